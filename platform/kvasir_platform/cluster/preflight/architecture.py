"""Checks whether vLLM runs a model's architecture, and in pools of which role."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

from kvasir.checkpoint.architectures import (
    KINDS,
    MULTIMODAL,
    PLUGINS,
    REMOVED,
    TRANSFORMERS,
    kind_of,
    looks_pooling,
)
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.model_types import MODEL_TYPES, TYPED_BY_ARCHITECTURE
from kvasir.config.load.support import Platform
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.requests import Role
from kvasir_platform.cluster.preflight.finding import Finding

_OTHER_MODEL = "choose another model, or correct config.json"


def architecture_findings(
    view: Deployment,
    pools: Sequence[PoolSpec],
    config: ModelConfig,
    *,
    platform: Platform,
    has_torchvision: bool,
) -> Iterator[Finding]:
    """Yield what keeps the model from running in `pools`, which are real engines of `view`."""
    what, names = _named(config), config.architectures
    if any(name in pool.engine.args.get("model_class_overrides", {}) for pool in pools for name in names):
        return
    if problem := _not_run(view, config, what):
        yield problem
    elif not _generates(config):
        yield from _needs_embed(pools, config, what)
    elif platform == "cpu" and not has_torchvision and names[0] in MULTIMODAL:
        yield Finding(
            "model",
            "warning",
            f"{what} is multimodal, and torchvision is not installed: most image processors need it to start",
            "serve a text-only model, or install the torchvision that matches torch",
        )


def _not_run(view: Deployment, config: ModelConfig, what: str) -> Finding | None:
    """Return why vLLM does not run the model, whatever the pool's role."""
    if not config.architectures:
        remedy = "add its architectures, such as [LlamaForCausalLM], or download config.json again"
        return Finding("model", "error", f"{what} names no architectures", remedy)
    trusted = view.model.trust_remote_code
    if problem := _type_problem(config, what, trusted=trusted):
        return problem
    kind = kind_of(config.architectures)
    if kind is None and not (view.embeds and looks_pooling(config.architectures[0])):
        return _unknown(config, what, trusted=trusted)
    if kind == "draft":
        remedy = "set model.source to the model that it was trained for"
        return Finding("model", "error", f"{what} only proposes tokens for another model", remedy)
    if config.raw.get("is_encoder_decoder") and config.architectures[0] in TRANSFORMERS:
        message = f"{what} has an encoder and a decoder, which vLLM does not run"
        return Finding("model", "error", message, _OTHER_MODEL)
    return None


def _named(config: ModelConfig) -> str:
    names = ", ".join(config.architectures)
    return f"{config.folder}/config.json" if not names else f"{config.folder} ({names})"


def _type_problem(config: ModelConfig, what: str, *, trusted: bool) -> Finding | None:
    """Return why config.json cannot be read into a configuration class."""
    name = config.model_type
    if not name or name in MODEL_TYPES or config.architectures[0] in TYPED_BY_ARCHITECTURE:
        return None
    code = config.raw.get("auto_map")
    if isinstance(code, dict) and "AutoConfig" in code:
        unknown = f"vLLM and transformers do not know model_type {name}"
        return None if trusted else _needs_code(what, unknown)
    return Finding(
        "model",
        "error",
        f"{what}: vLLM and transformers do not know model_type {name}",
        f"{_nearest([name], MODEL_TYPES)}{_OTHER_MODEL}",
    )


def _unknown(config: ModelConfig, what: str, *, trusted: bool) -> Finding | None:
    for name in config.architectures:
        if version := REMOVED.get(name):
            return Finding("model", "error", f"{what}: vLLM ran it until version {version}", _OTHER_MODEL)
        if plugin := PLUGINS.get(name):
            message = f"{what}: vLLM runs it with a plugin only ({plugin})"
            return Finding("model", "error", message, _OTHER_MODEL)
    code = config.raw.get("auto_map")
    if isinstance(code, dict) and any(name.startswith("AutoModel") for name in code):
        return None if trusted else _needs_code(what, "vLLM and transformers do not know its architecture")
    return Finding(
        "model",
        "error",
        f"{what}: vLLM does not know the architecture",
        f"{_nearest(config.architectures, KINDS)}{_OTHER_MODEL}",
    )


def _needs_code(what: str, why: str) -> Finding:
    return Finding(
        "model",
        "error",
        f"{what} needs Python code from its repository (auto_map in config.json): {why}",
        "set model.trust_remote_code: true if you trust that code, or choose another model",
    )


def _generates(config: ModelConfig) -> bool:
    return kind_of(config.architectures) != "pooling" and not config.pools_sentences


def _needs_embed(pools: Sequence[PoolSpec], config: ModelConfig, what: str) -> Iterator[Finding]:
    why = "computes embeddings or scores, and no text"
    if config.pools_sentences:
        why = "computes embeddings: modules.json says how to pool them"
    if names := [pool.name for pool in pools if pool.role is not Role.EMBED]:
        yield Finding(
            "model",
            "error",
            f"{what} {why}: pool {', '.join(names)} cannot generate with it",
            f"serve it by one pool with role: embed instead of {', '.join(names)}",
        )


def _nearest(names: Iterable[str], known: Iterable[str]) -> str:
    near = [each for name in names for each in difflib.get_close_matches(name, known, n=3, cutoff=0.75)]
    return f"the nearest known: {', '.join(near[:3])}; " if near else ""
