"""Replaces `auto` for parsers by the parser of the model's family, equally for gateways and workers."""

from __future__ import annotations

from pathlib import Path

from kvasir.checkpoint.model_config import read_model_config
from kvasir.checkpoint.parsers import reasoning_parser, tool_parser
from kvasir.config.checks.parsers import NO_PARSER
from kvasir.config.load.model_files import chat_template, configured_template
from kvasir.config.load.model_support import with_length
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role

_ANSWERING = (Role.DECODE, Role.BOTH)
_CHOICES = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}


def resolved(view: Deployment, folder: Path) -> Deployment:
    """Return `view` with every `auto` that depends on the files of its model in `folder` replaced, and with
    the parsers of pools that answer in prefill pools that name none. Raises ConfigError if one cannot be."""
    return with_parsers(with_length(with_shared_parsers(view), folder), folder)


def with_shared_parsers(view: Deployment) -> Deployment:
    """Return `view` with the parsers of its first pool that answers in prefill pools that name none, since
    these answer while no other worker serves."""
    answering = next((pool.engine for pool in view.pools if pool.role in _ANSWERING), None)
    if answering is None:
        return view
    shared = {field: getattr(answering, field) for field in _CHOICES}
    pools = tuple(_sharing(pool, shared) for pool in view.pools)
    return view if pools == view.pools else view.model_copy(update={"pools": pools})


def answers_alike(view: Deployment, pool: PoolSpec) -> bool:
    """Return whether the engine of `pool` splits output as the pools of `view` that answer do."""
    answering = [each.engine for each in view.pools if each.role in _ANSWERING]
    return all(
        getattr(pool.engine, field) == getattr(each, field) for each in answering for field in _CHOICES
    )


def with_parsers(view: Deployment, folder: Path) -> Deployment:
    """Return `view` with the names of parsers for the model in `folder`: where the spec has `auto`, and, if
    one is certain, the parser of tool calls where it has none. Raises ConfigError if the spec has `auto` and
    no parser is certain."""
    asked = fields_with_auto(view)
    names = _certain(view, folder) if asked or any(map(_takes_default, view.pools)) else {}
    for field in sorted(asked):
        if names[field] is None:
            raise ConfigError(
                f"engine.{field}: auto, and the files of {view.model.name} "
                f"({read_model_config(folder).model_type}) name no parser for certain; set the name of one, "
                "or leave it out"
            )
    pools = tuple(_named(pool, names) for pool in view.pools)
    return view if pools == view.pools else view.model_copy(update={"pools": pools})


def fields_with_auto(view: Deployment) -> set[str]:
    """Return the fields of engines for which the spec has `auto`."""
    return {field for pool in view.pools for field in _CHOICES if getattr(pool.engine, field) == "auto"}


def _certain(view: Deployment, folder: Path) -> dict[str, str | None]:
    """Return the parsers that the model's files call for, None for each that is not certain."""
    configured = configured_template(view.model.chat_template)
    template = chat_template(folder, tools=True) if configured is None else configured
    path = folder / "tokenizer.json"
    tokenizer = path.read_text(encoding="utf-8") if path.is_file() else ""
    model_type = read_model_config(folder).model_type
    return {field: choose(model_type, template, tokenizer) for field, choose in _CHOICES.items()}


def _takes_default(pool: PoolSpec) -> bool:
    return pool.role is not Role.EMBED and pool.engine.tool_parser is None


def _sharing(pool: PoolSpec, shared: dict[str, str | None]) -> PoolSpec:
    changes = {field: name for field, name in shared.items() if name and not getattr(pool.engine, field)}
    if pool.role is not Role.PREFILL or not changes:
        return pool
    return pool.model_copy(update={"engine": pool.engine.model_copy(update=changes)})


def _named(pool: PoolSpec, names: dict[str, str | None]) -> PoolSpec:
    engine = pool.engine
    changes = {field: names[field] for field in _CHOICES if getattr(engine, field) == "auto"}
    if engine.tool_parser == NO_PARSER:
        changes["tool_parser"] = None
    elif _takes_default(pool) and names["tool_parser"] is not None:
        changes["tool_parser"] = names["tool_parser"]
    return pool.model_copy(update={"engine": engine.model_copy(update=changes)}) if changes else pool
