"""Replaces `auto` for parsers by the parser of the model's family, equally for gateways and workers."""

from __future__ import annotations

from pathlib import Path

from kvasir.checkpoint.model_config import read_model_config
from kvasir.checkpoint.parsers import reasoning_parser, tool_parser
from kvasir.config.load.model_files import chat_template, configured_template
from kvasir.config.load.model_support import with_length
from kvasir.config.spec.deployment import Deployment, EngineSpec
from kvasir.core.errors import ConfigError

_CHOICES = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}


def resolved(view: Deployment, folder: Path) -> Deployment:
    """Return `view` with every `auto` that depends on the files of its model in `folder` replaced. Raises
    ConfigError if one cannot be."""
    return with_parsers(with_length(view, folder), folder)


def with_parsers(view: Deployment, folder: Path) -> Deployment:
    """Return `view` with the names of parsers for the model in `folder`. Raises ConfigError if the spec has
    `auto` and no parser is certain."""
    wanted = {field for pool in view.pools for field in _CHOICES if getattr(pool.engine, field) == "auto"}
    if not wanted:
        return view
    configured = configured_template(view.model.chat_template)
    template = chat_template(folder, tools=True) if configured is None else configured
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    model_type = read_model_config(folder).model_type
    names = {field: _CHOICES[field](model_type, template, tokenizer) for field in wanted}
    for field in sorted(wanted):
        if names[field] is None:
            raise ConfigError(
                f"engine.{field}: auto, and the files of {view.model.name} ({model_type}) name no parser for "
                "certain; set the name of one, or leave it out"
            )
    pools = tuple(pool.model_copy(update={"engine": _named(pool.engine, names)}) for pool in view.pools)
    return view.model_copy(update={"pools": pools})


def _named(engine: EngineSpec, names: dict[str, str | None]) -> EngineSpec:
    changes = {field: name for field, name in names.items() if getattr(engine, field) == "auto"}
    return engine.model_copy(update=changes)
