"""The table of the Responses API in docs/API.md has each field of the schema, and says which are refused."""

from __future__ import annotations

import re
from pathlib import Path

from kvasir_platform.gateway.openai.schema.decode import not_served
from kvasir_platform.gateway.responses.body import ResponsesBody

PAGE = Path(__file__).parents[4] / "docs" / "API.md"


def fields(*, refused: bool) -> set[str]:
    names = set(not_served(ResponsesBody))
    return names if refused else set(ResponsesBody.__struct_fields__) - names


def named(*, refused: bool) -> set[str]:
    """The fields that rows of one kind name, by their first part."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Responses\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")]
    return {
        name.partition(".")[0]
        for names, what in rows
        if what.strip().startswith("refused") is refused
        for name in re.findall(r"`([^`]+)`", names)
    }


def test_the_table_has_each_field() -> None:
    assert fields(refused=False) <= named(refused=False)


def test_the_table_says_which_fields_are_refused() -> None:
    assert fields(refused=True) <= named(refused=True)
    assert not fields(refused=True) & named(refused=False)
