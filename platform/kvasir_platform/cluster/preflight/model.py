"""Checks whether the files of a model can be served."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.config.load.support import Platform
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir_platform.cluster.preflight.architecture import architecture_findings
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.footprint import size_text
from kvasir_platform.cluster.preflight.machine_facts import ModelProbe

_SENTENCE_PIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v3")
_OTHER_CONFIGURATION = {"hf_config_path", "config_format"}
"""Arguments of vLLM that let it read the model's configuration from another file than config.json."""
_TOKENIZERS = {
    **dict.fromkeys(_SENTENCE_PIECE, "a SentencePiece tokenizer"),
    "tekken.json": "a Mistral tokenizer",
    "vocab.json": "a slow tokenizer",
    "vocab.txt": "a slow tokenizer",
}


def model_findings(
    view: Deployment, model: ModelProbe, *, platform: Platform, has_torchvision: bool
) -> Iterator[Finding]:
    """Yield the problems of the model of `view`, or that there are none."""
    if view.model.trust_remote_code:
        yield Finding(
            "model",
            "warning",
            f"model.trust_remote_code: workers run the Python code that comes with {view.model.source} "
            f"(revision {view.model.revision})",
            "name a commit in model.revision whose code you have read, or leave it out",
        )
    if model.to_download:
        yield _to_download(view, model)
        return
    if model.problem or model.config is None:
        yield Finding("model", "error", model.problem, "correct model.source")
        return
    # A router needs no weights.
    serves = view.discovery.kind != "kubernetes"
    problems = [*_tokenizer(model), *(_weights(view, model) if serves else ())]
    for pools, config in _as_served(view, model.config):
        engines = [pool for pool in pools if pool.engine.kind == "vllm"]
        if serves and engines:
            problems += architecture_findings(
                view, engines, config, platform=platform, has_torchvision=has_torchvision
            )
        problems += _positions(view, config)
    yield from problems
    if not any(finding.level == "error" for finding in problems):
        weights = f" ({size_text(model.weight_bytes)} of weights)" if model.weight_bytes else ""
        yield Finding("model", "ok", f"{model.folder}{weights}")


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


def _to_download(view: Deployment, model: ModelProbe) -> Finding:
    message = f"{view.model.source} (revision {view.model.revision}) is not in the Hugging Face cache"
    if model.offline:
        remedy = "unset HF_HUB_OFFLINE, download it elsewhere, or name a folder in model.source"
        return Finding("model", "error", f"{message}, and HF_HUB_OFFLINE forbids the download", remedy)
    return Finding("model", "warning", f"{message}: the start will download it first")


def _tokenizer(model: ModelProbe) -> Iterator[Finding]:
    if "tokenizer.json" in model.files:
        return
    other = next((name for name in _TOKENIZERS if name in model.files), "")
    found = f"has {_TOKENIZERS[other]} ({other}), and" if other else "has no tokenizer:"
    convert = (
        f"from transformers import AutoTokenizer as T; T.from_pretrained('{model.folder}')"
        f".save_pretrained('{model.folder}')"
    )
    yield Finding(
        "model",
        "error",
        f"{model.folder} {found} Kvasir reads tokenizer.json only",
        f'write one: python -c "{convert}"' if other else "add tokenizer.json of the model's repository",
    )


def _weights(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    dummy = all(pool.engine.args.get("load_format") == "dummy" for pool in view.pools)
    if model.weights_problem and not dummy:
        remedy = "complete the folder, for instance by downloading it again, or save the model as safetensors"
        yield Finding("model", "error", model.weights_problem, remedy)
    quantized = model.config is not None and model.config.quantization is not None
    if view.model.quantization == "int8" and quantized:
        yield Finding(
            "model",
            "error",
            f"model.quantization is int8, and {model.folder} is quantized already",
            "set model.quantization to none, or take the unquantized model",
        )


def _positions(view: Deployment, config: ModelConfig) -> Iterator[Finding]:
    limit, wanted = config.max_positions, view.model.max_model_len
    if limit is not None and wanted > limit:
        yield Finding(
            "model",
            "error",
            f"model.max_model_len is {wanted}, and the model supports {limit} positions",
            f"set model.max_model_len to {limit} or less",
        )
