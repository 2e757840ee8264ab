"""Checks whether the files of a model can be served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvasir.checkpoint.architectures import MULTIMODAL
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.sampling_defaults import sampling_defaults
from kvasir.config.load.model_parsers import fields_with_auto, with_parsers
from kvasir.config.load.model_support import SAME_MODEL, model_problems, needs_weights, serves_config
from kvasir.config.load.object_storage import is_object_uri
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir.core.size_text import size_text
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.machine_facts import ModelProbe

_BY_TRANSFORMERS = (
    "from transformers import AutoTokenizer as T; T.from_pretrained({0!r}).save_pretrained({0!r})"
)
_BY_ITS_MISTRAL_PART = (
    "from transformers.integrations.mistral import convert_tekken_tokenizer as c; "
    "c({0!r} + '/tekken.json').save_pretrained({0!r})"
)
_TOKENIZERS = {
    "tekken.json": ("a Mistral tokenizer", _BY_ITS_MISTRAL_PART),
    "tokenizer.model": ("a SentencePiece tokenizer", _BY_TRANSFORMERS),
    "tokenizer.model.v3": ("a SentencePiece tokenizer", _BY_TRANSFORMERS),
    "spiece.model": ("a SentencePiece tokenizer", _BY_TRANSFORMERS),
    "sentencepiece.bpe.model": ("a SentencePiece tokenizer", _BY_TRANSFORMERS),
    "vocab.json": ("a slow tokenizer", _BY_TRANSFORMERS),
    "vocab.txt": ("a slow tokenizer", _BY_TRANSFORMERS),
}
"""Other files of a tokenizer, and the Python code that writes tokenizer.json from them."""

_DOWNLOAD_AGAIN = (
    "complete the folder, for instance by downloading it again, or save the model as safetensors"
)


def model_findings(view: Deployment, model: ModelProbe, *, lacks_torchvision: bool) -> Iterator[Finding]:
    """Yield the problems of the model of `view`, or that there are none. `lacks_torchvision` says that
    engines run here, without torchvision."""
    if view.model.trust_remote_code:
        yield Finding(
            "model",
            "warning",
            f"model.trust_remote_code: workers run the Python code that comes with {view.model.source} "
            f"(revision {view.model.revision})",
            "name a commit in model.revision whose code you have read, or leave it out",
        )
    if model.to_download:
        yield from _to_download(view, model)
        if model.config is None:
            return
    problems = list(content_findings(view, model))
    yield from problems
    if problems or model.config is None:
        return
    if not model.to_download:
        weights = f" ({size_text(model.weight_bytes)} of weights)" if model.weight_bytes else ""
        yield Finding("model", "ok", f"{model.folder}{weights}")
    if lacks_torchvision:
        yield from _image_processor(model.config)


def content_findings(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    """Yield why what is known of the files of the model of `view` cannot be served."""
    if model.problem or model.config is None:
        message, _, remedy = model.problem.partition("; ")
        yield Finding("model", "error", message, remedy or "correct model.source")
        return
    yield from (*_tokenizer(model), *_weights(view, model), *_parsers(view, model), *_sampling(view, model))
    for each in model_problems(view, model.config):
        yield Finding("model", "error", each.message, each.remedy)


def _to_download(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    if is_object_uri(view.model.source):
        message = f"{view.model.source}: its configuration has not been read from object storage yet"
        yield Finding("model", "warning", f"{message}: the start will do it first")
        return
    message = f"{view.model.source} (revision {view.model.revision}) is not in the Hugging Face cache"
    if model.offline:
        remedy = "unset HF_HUB_OFFLINE, download it elsewhere, or name a folder in model.source"
        yield Finding("model", "error", f"{message}, and HF_HUB_OFFLINE forbids the download", remedy)
    elif model.unknown:
        yield Finding(
            "model", "warning", f"{message}; whether it can be served is not known: {model.unknown}"
        )
    else:
        size = size_text(model.download_bytes) if model.download_bytes else "it"
        yield Finding("model", "warning", f"{message}: the start will download {size} first")
    if model.download_bytes > model.cache_free:
        yield Finding(
            "model",
            "error",
            f"{model.cache} has {size_text(model.cache_free)} free, and the download needs "
            f"{size_text(model.download_bytes)}",
            "make room, or set HF_HOME to a folder with more",
        )


def _tokenizer(model: ModelProbe) -> Iterator[Finding]:
    if model.tokenizer_problem:
        message, _, remedy = model.tokenizer_problem.partition("; ")
        yield Finding("model", "error", message, remedy)
    if "tokenizer.json" in model.files:
        return
    other = next((name for name in _TOKENIZERS if name in model.files), None)
    if other is None:
        message = f"{model.folder} has no tokenizer: Kvasir reads tokenizer.json only"
        yield Finding("model", "error", message, "add tokenizer.json from the model's repository")
        return
    kind, code = _TOKENIZERS[other]
    message = f"{model.folder} has {kind} ({other}), and Kvasir reads tokenizer.json only"
    if not model.to_download:
        remedy = f'write one: python -c "{code.format(model.folder)}"'
    else:
        folder = model.folder.rpartition("/")[2]
        remedy = (
            f"download it (hf download {model.folder} --local-dir {folder}), "
            f'write one (python -c "{code.format(folder)}"), and set model.source=./{folder}'
        )
    yield Finding("model", "error", message, remedy)


def _parsers(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    if "tokenizer.json" not in model.files or model.tokenizer_problem or model.to_download:
        return
    if not fields_with_auto(view):
        return
    try:
        with_parsers(view, Path(model.folder))
    except ConfigError as error:
        message, _, remedy = error.message.partition("; ")
        yield Finding("model", "error", message, remedy)


def _sampling(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    if model.to_download or view.model.generation_config == "none":
        return
    try:
        sampling_defaults(Path(model.folder))
    except ConfigError as error:
        yield Finding("model", "error", error.message, "correct it, or set model.generation_config: none")


def _weights(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    # A router needs no weights; those on a volume that it shares with workers count.
    held = view.discovery.kind != "kubernetes" or any(each.endswith(".safetensors") for each in model.files)
    if not held or not needs_weights(view):
        return
    if model.weights_problem:
        message, _, remedy = model.weights_problem.partition("; ")
        yield Finding("model", "error", message, remedy or _DOWNLOAD_AGAIN)
    if model.mismatch and serves_config(view):
        yield Finding("model", "error", f"{model.folder}: {model.mismatch}", SAME_MODEL)


def _image_processor(config: ModelConfig) -> Iterator[Finding]:
    if config.architectures and config.architectures[0] in MULTIMODAL:
        yield Finding(
            "model",
            "warning",
            f"{config.architectures[0]} is multimodal, and torchvision is not installed: the start fails if "
            "its image processor needs it, as most do",
            "serve a text-only model, or install the torchvision that matches torch",
        )
