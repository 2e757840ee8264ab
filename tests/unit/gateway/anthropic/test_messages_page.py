"""The table of the Messages API in docs/API.md says of each field what the schema says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from kvasir_platform.gateway.anthropic.schema import (
    ClientTool,
    CountTokensBody,
    DocumentBlock,
    InputBlock,
    MessagesBody,
    MessagesMetadata,
    OutputConfig,
    RedactedThinkingBlock,
)

PAGE = Path(__file__).parents[4] / "docs" / "API.md"
IGNORED_BY_VALUE = {"service_tier"}
"""Fields whose values are checked, and have no effect."""


def states(kind: Any, prefix: str = "") -> dict[str, str]:
    """The state of each field of a struct, by its annotation."""
    made = {}
    for base in reversed(kind.__mro__):
        for name, annotation in getattr(base, "__annotations__", {}).items():
            ignored = annotation.startswith("Ignored") or name in IGNORED_BY_VALUE
            state = "refused" if annotation == "NotServed" else "ignored" if ignored else "supported"
            made[prefix + name] = state
    return made


def served() -> dict[str, str]:
    fields = {**states(MessagesBody), **states(CountTokensBody)}
    for name in ("metadata", "output_config", "tools"):
        del fields[name]
    fields |= states(MessagesMetadata, "metadata.")
    fields |= states(OutputConfig, "output_config.")
    fields |= states(ClientTool, "tools[].")
    for block in get_args(InputBlock):
        state = "refused" if block is DocumentBlock else "supported"
        if block is RedactedThinkingBlock:
            state = "ignored"
        fields[f"content[]: {block.__struct_config__.tag}"] = state
    return fields


def shown() -> dict[str, str]:
    section = (
        PAGE.read_text(encoding="utf-8").partition("## Anthropic's Messages API")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return {name: state.strip() for names, state in rows for name in re.findall(r"`([^`]+)`", names)}


def test_the_table_has_each_field_with_its_state() -> None:
    assert shown() == served()
