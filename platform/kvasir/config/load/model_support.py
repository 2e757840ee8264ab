"""Checks that vLLM can serve a model in the pools of a deployment, from the model's configuration alone.

vLLM finds most of these problems a minute into a start, in a child process. The command line checks them
before anything starts, and a worker before it imports vLLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.checkpoint.architectures import (
    KINDS,
    PLUGINS,
    REMOVED,
    TRANSFORMERS,
    Kind,
    classifies,
    kind_of,
    looks_pooling,
)
from kvasir.checkpoint.classes import Classes, classes_of
from kvasir.checkpoint.consistency import mismatch
from kvasir.checkpoint.model_config import ModelConfig, read_model_config
from kvasir.checkpoint.model_types import MODEL_TYPES, TYPED_BY_ARCHITECTURE
from kvasir.checkpoint.tensors import read_tensors
from kvasir.config.checks.quantization import (
    declared_method,
    quantization_problem,
    reads_checkpoint,
)
from kvasir.config.load.object_storage import is_object_uri, refuse_without_streamer, streams_weights
from kvasir.config.load.parallel_support import expert_problems
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role

_OTHER_CONFIGURATION = {"hf_config_path", "config_format"}
"""Arguments of vLLM that let it read the model's configuration from another file than config.json."""
SAME_MODEL = "take config.json and weights from the same model"
"""What to do about weights that differ from config.json."""
_OTHER_MODEL = "choose another model, or correct config.json"

_NOT_SERVED: dict[Kind | None, tuple[str, str]] = {
    "scoring": (
        "computes classes of tokens or rewards, which no pool serves",
        "choose a model for classes of texts or embeddings (role: embed), or for text",
    ),
    "draft": (
        "only proposes tokens for another model",
        "set model.source to the model that it was trained for",
    ),
}
"""Why a kind of architecture is not served, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelProblem:
    """Why a model cannot be served, and what to do about it."""

    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


def model_problems(view: Deployment, config: ModelConfig) -> list[ModelProblem]:
    """Return why the pools of `view` cannot serve the model with `config`, [] if they can."""
    found: list[ModelProblem] = []
    for pools, used in _as_served(view, config):
        engines = [pool for pool in pools if pool.engine.kind == "vllm"]
        found.extend(_architecture(view, engines, used))
        found.extend(_positions(view, pools, used))
        found.extend(ModelProblem(*problem) for pool in pools for problem in expert_problems(pool, used))
        found.extend(_quantization(view, engines, used))
    return found


def _quantization(
    view: Deployment, engines: Sequence[PoolSpec], config: ModelConfig
) -> Iterator[ModelProblem]:
    declared = declared_method(config.quantization)
    if engines and not reads_checkpoint(declared):
        yield ModelProblem(
            f"{_named(config)} is quantized with {declared}, which vLLM does not read",
            "take the model in bfloat16, or quantized with AWQ, GPTQ, FP8 or compressed-tensors",
        )
    elif problem := quantization_problem(view.model.quantization, declared):
        yield ModelProblem(*problem)


def served_classes(view: Deployment, folder: Path) -> Classes | None:
    """Return the classes that the pools of `view` compute with the model in `folder`, None if they do not
    classify. Raises ConfigError if its configuration cannot be read, or pools override it differently."""
    if not view.embeds:
        return None
    found = [classes_of(used) for _, used in _as_served(view, read_model_config(folder))]
    if any(each != found[0] for each in found):
        raise ConfigError(
            f"pools of {view.model.name} compute different classes; give them the same "
            "engine.args.hf_overrides"
        )
    return found[0] if found else None


def refuse_model(view: Deployment, folder: Path) -> None:
    """Raise ConfigError, with the reasons and remedies, unless the pools of `view` can serve the model in
    `folder`."""
    if streams_weights(view.model):
        refuse_without_streamer(f"streaming the weights of {view.model.source}")
    config = read_model_config(folder)
    if problems := model_problems(view, config):
        raise ConfigError("\n".join(map(str, problems)))
    if needs_weights(view):
        differs = mismatch(config, read_tensors(folder))
        if differs and serves_config(view):
            raise ConfigError(f"{folder}: {differs}; {SAME_MODEL}")


def served_length(view: Deployment, config: ModelConfig) -> int | None:
    """Return the maximum tokens of prompt and output together with which the pools of `view` serve the model
    with `config`. None if it is to be the model's own maximum, and its configuration states none."""
    if view.model.max_model_len != "auto":
        return view.model.max_model_len
    lengths = [used.default_positions for _, used in _as_served(view, config)]
    known = [length for length in lengths if length is not None]
    return min(known) if known and len(known) == len(lengths) else None


def with_length(view: Deployment, folder: Path) -> Deployment:
    """Return `view` with a number for `max_model_len`. Raises ConfigError if the model in `folder` states no
    maximum of its own."""
    if view.model.max_model_len != "auto":
        return view
    length = served_length(view, read_model_config(folder))
    if length is None:
        raise ConfigError(str(_no_length(folder)))
    return view.model_copy(update={"model": view.model.model_copy(update={"max_model_len": length})})


def needs_weights(view: Deployment) -> bool:
    """Whether a pool of `view` reads weights in the model's folder. Others stream them from object storage,
    or, for tests, vLLM makes them up."""
    if is_object_uri(view.model.source):
        return False
    return any(pool.engine.args.get("load_format") != "dummy" for pool in view.pools)


def serves_config(view: Deployment) -> bool:
    """Whether all pools of `view` compute with config.json as it is, so that weights have to fit it."""
    changed = {"hf_overrides"} | _OTHER_CONFIGURATION
    return not any(changed & pool.engine.args.keys() for pool in view.pools)


def _as_served(view: Deployment, config: ModelConfig) -> list[tuple[list[PoolSpec], ModelConfig]]:
    """Return the configurations that engines use, each with its pools: engine.args can override fields of
    config.json. Pools that read another file are left out."""
    found: list[tuple[list[PoolSpec], ModelConfig]] = []
    for pool in view.pools:
        arguments = pool.engine.args
        if _OTHER_CONFIGURATION & arguments.keys():
            continue
        used = config.overridden(arguments.get("hf_overrides", {}))
        same = next((pools for pools, each in found if each == used), None)
        if same is None:
            found.append(([pool], used))
        else:
            same.append(pool)
    return found


def _positions(view: Deployment, pools: Sequence[PoolSpec], config: ModelConfig) -> Iterator[ModelProblem]:
    limit, wanted = config.max_positions, view.model.max_model_len
    if wanted == "auto":
        yield from _own_positions(pools, config)
    elif limit is not None and wanted > limit:
        yield ModelProblem(
            f"model.max_model_len is {wanted}, and the model supports {limit} positions",
            f"set model.max_model_len to {limit} or less",
        )


def _own_positions(pools: Sequence[PoolSpec], config: ModelConfig) -> Iterator[ModelProblem]:
    length = config.default_positions
    if length is None:
        yield _no_length(config.folder)
        return
    for pool in pools:
        engine = pool.engine
        if not engine.chunked_prefill and engine.max_num_batched_tokens < length:
            yield ModelProblem(
                f"pools.{pool.name}.engine.max_num_batched_tokens: {engine.max_num_batched_tokens} is less "
                f"than the {length} tokens of model.max_model_len auto, and without chunked_prefill a prompt "
                "must fit in one step",
                "raise it, turn chunked_prefill on, or set model.max_model_len",
            )


def _no_length(folder: Path) -> ModelProblem:
    return ModelProblem(
        f"model.max_model_len is auto, and {folder}/config.json states no number of positions",
        "set model.max_model_len to a number",
    )


def _architecture(view: Deployment, pools: Sequence[PoolSpec], config: ModelConfig) -> Iterator[ModelProblem]:
    own = {name for pool in pools for name in pool.engine.args.get("model_class_overrides", {})}
    if not pools or own.intersection(config.architectures):
        return
    what = _named(config)
    if problem := _not_run(view, config, what):
        yield problem
    elif (
        kind_of(config.architectures) == "pooling"
        or classifies(config.architectures)
        or config.pools_sentences
    ):
        yield from _needs_embed(pools, config, what)


def _not_run(view: Deployment, config: ModelConfig, what: str) -> ModelProblem | None:
    """Return why vLLM does not run the model, whatever the pool's role."""
    if not config.architectures:
        remedy = "add its architectures, such as [LlamaForCausalLM], or download config.json again"
        return ModelProblem(f"{what} names no architectures", remedy)
    trusted = view.model.trust_remote_code
    if problem := _type_problem(config, what, trusted=trusted):
        return problem
    kind = kind_of(config.architectures)
    if kind is None and not (view.embeds and looks_pooling(config.architectures[0])):
        return _unknown(config, what, trusted=trusted)
    if kind in _NOT_SERVED and not classifies(config.architectures):
        why, remedy = _NOT_SERVED[kind]
        return ModelProblem(f"{what} {why}", remedy)
    if config.raw.get("is_encoder_decoder"):
        run = config.architectures[0] not in TRANSFORMERS
        # Those that vLLM runs transcribe audio, or need images in the encoder.
        why = "and no request here has an input for the encoder" if run else "which vLLM does not run"
        return ModelProblem(f"{what} has an encoder and a decoder, {why}", _OTHER_MODEL)
    return None


def _named(config: ModelConfig) -> str:
    names = ", ".join(config.architectures)
    return f"{config.folder}/config.json" if not names else f"{config.folder} ({names})"


def _type_problem(config: ModelConfig, what: str, *, trusted: bool) -> ModelProblem | None:
    """Return why config.json cannot be read into a configuration class."""
    name = config.model_type
    if not name or name in MODEL_TYPES or config.architectures[0] in TYPED_BY_ARCHITECTURE:
        return None
    code = config.raw.get("auto_map")
    if isinstance(code, dict) and "AutoConfig" in code:
        unknown = f"vLLM and transformers do not know model_type {name}"
        return None if trusted else _needs_code(what, unknown)
    return ModelProblem(
        f"{what}: vLLM and transformers do not know model_type {name}",
        f"{_nearest([name], MODEL_TYPES)}{_OTHER_MODEL}",
    )


def _unknown(config: ModelConfig, what: str, *, trusted: bool) -> ModelProblem | None:
    for name in config.architectures:
        if version := REMOVED.get(name):
            return ModelProblem(f"{what}: vLLM ran it until version {version}", _OTHER_MODEL)
        if plugin := PLUGINS.get(name):
            message = f"{what}: vLLM runs it with a plugin only ({plugin})"
            return ModelProblem(message, _OTHER_MODEL)
    code = config.raw.get("auto_map")
    if isinstance(code, dict) and any(name.startswith("AutoModel") for name in code):
        return None if trusted else _needs_code(what, "vLLM and transformers do not know its architecture")
    return ModelProblem(
        f"{what}: vLLM does not know the architecture",
        f"{_nearest(config.architectures, KINDS)}{_OTHER_MODEL}",
    )


def _needs_code(what: str, why: str) -> ModelProblem:
    return ModelProblem(
        f"{what} needs Python code from its repository (auto_map in config.json): {why}",
        "set model.trust_remote_code: true if you trust that code, or choose another model",
    )


def _needs_embed(pools: Sequence[PoolSpec], config: ModelConfig, what: str) -> Iterator[ModelProblem]:
    why = "computes embeddings, and no text"
    if classifies(config.architectures):
        why = "computes classes, and no text"
    elif config.pools_sentences:
        why = "computes embeddings: modules.json says how to pool them"
    if names := [pool.name for pool in pools if pool.role is not Role.EMBED]:
        yield ModelProblem(
            f"{what} {why}: pool {', '.join(names)} cannot generate with it",
            f"serve it by one pool with role: embed instead of {', '.join(names)}",
        )


def _nearest(names: Iterable[str], known: Iterable[str]) -> str:
    near = [each for name in names for each in difflib.get_close_matches(name, known, n=3, cutoff=0.75)]
    return f"the nearest known: {', '.join(near[:3])}; " if near else ""
