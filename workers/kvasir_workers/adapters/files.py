"""Reads the files of a LoRA adapter in PEFT's format, and refuses those that the model cannot use.

An engine that loads a wrong adapter pauses all of its streams to find out, or serves nonsense. Everything
that headers and configuration show is therefore checked before. Weights must be safetensors: other formats
can run code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.checkpoint.json_file import read_json_object
from kvasir.checkpoint.tensors import TensorHeader, read_tensors, tensors_of
from kvasir.core.errors import ConfigError, RequestError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_DIGEST_DIGITS = 16
_READ_BYTES = 1 << 20
_PREFIX = "base_model.model."
_PLAIN_DTYPES = {"F32", "F16", "BF16", "F64"}
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A readable adapter. `digest` identifies the contents of its files, `nbytes` is their size."""

    folder: Path
    rank: int
    nbytes: int
    digest: str


def base_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's plain weights by module, from the layer on (`layers.0.mlp.up_proj`).
    Empty if the model's tensors cannot be read; quantized weights are left out."""
    try:
        tensors = read_tensors(folder)
    except ConfigError:
        return {}
    return {
        _from_layer(tensor.name.removesuffix(".weight")): tensor.shape
        for tensor in tensors
        if tensor.name.endswith(".weight") and tensor.dtype in _PLAIN_DTYPES
    }


def read_adapter(folder: Path, name: str, *, max_rank: int, max_bytes: int, base: Shapes) -> AdapterFiles:
    """Read the adapter in `folder`, whose errors call it `name`, for a model with the shapes `base`. Raise
    RequestError (adapter_unreadable, adapter_too_large, adapter_rank_too_large, adapter_base_mismatch)."""
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    for path in (config, weights):
        if not path.is_file():
            raise _unreadable(f"{name} has no {path.name}; it must be a PEFT adapter with safetensors")
    nbytes = config.stat().st_size + weights.stat().st_size
    if nbytes > max_bytes:
        raise too_large(name, nbytes, max_bytes)
    try:
        settings, tensors = read_json_object(config), tensors_of(weights)
    except ConfigError as error:
        raise _unreadable(f"{name} cannot be read: {error.message}") from error
    rank = _rank(settings, tensors, name)
    if rank > max_rank:
        raise RequestError(
            f"{name} has rank {rank}, and the engine reserves memory for ranks up to {max_rank}; raise "
            "lora_loading.max_rank in kvasir.yaml and restart the pools",
            code="adapter_rank_too_large",
            param="lora_path",
        )
    if problem := _mismatch(tensors, base):
        trained = settings.get("base_model_name_or_path")
        raise RequestError(
            f"{name} was not trained on this model: {problem}. Its {CONFIG_FILE} names "
            f"{str(trained)[:256]!r} as base model",
            code="adapter_base_mismatch",
            param="lora_path",
        )
    return AdapterFiles(folder, rank, nbytes, _digest((config, weights)))


def too_large(name: str, nbytes: int, max_bytes: int) -> RequestError:
    """Return the error for an adapter that is larger than the spec allows."""
    return RequestError(
        f"{name} has {nbytes:,} bytes; lora_loading.max_bytes in kvasir.yaml allows {max_bytes:,}",
        code="adapter_too_large",
        param="lora_path",
    )


def _rank(settings: Mapping[str, Any], tensors: Iterable[TensorHeader], name: str) -> int:
    ranks = [tensor.shape[0] for tensor in tensors if ".lora_A." in tensor.name and tensor.shape]
    if not ranks:
        raise _unreadable(f"{name} has no LoRA tensors (names with .lora_A.) in {WEIGHTS_FILE}")
    stated = settings.get("r")
    return max(*ranks, stated if isinstance(stated, int) else 0)


def _mismatch(tensors: Iterable[TensorHeader], base: Shapes) -> str | None:
    """Return the first tensor that does not fit the module that it adapts, or None. Modules that are not in
    `base` are left to the engine."""
    layers = [int(part) for name in base if (part := _layer(name)).isdigit()]
    for tensor in tensors:
        module, is_input, end = tensor.name.removeprefix(_PREFIX).partition(".lora_A.")
        if not is_input:
            module, is_output, end = module.partition(".lora_B.")
            if not is_output:
                continue
        module = _from_layer(module)
        if layers and (part := _layer(module)).isdigit() and int(part) > max(layers):
            return f"it adapts layer {part}, and the model's last layer is {max(layers)}"
        shape = base.get(module, ())
        if end != "weight" or len(shape) != 2 or len(tensor.shape) != 2:
            continue
        expected, found = (shape[1], tensor.shape[1]) if is_input else (shape[0], tensor.shape[0])
        if expected != found:
            side = "inputs" if is_input else "outputs"
            return f"{module} has {expected} {side} in the model, and {found} in the adapter"
    return None


def _from_layer(module: str) -> str:
    at = module.find("layers.")
    return module if at < 0 else module[at:]


def _layer(module: str) -> str:
    return module.split(".")[1] if module.startswith("layers.") else ""


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as stream:
            while part := stream.read(_READ_BYTES):
                digest.update(part)
    return digest.hexdigest()[:_DIGEST_DIGITS]


def _unreadable(message: str) -> RequestError:
    return RequestError(message, code="adapter_unreadable", param="lora_path")
