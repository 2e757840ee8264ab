"""int8 weights created at load: a compressed-tensors copy of a model folder, written once into a cache.

vLLM quantizes Linear layers to int8 online only inside mixtures of experts, but it loads W8A8 checkpoints in
the compressed-tensors format on CPU and GPU. This module writes that format: int8 weights with one scale per
output channel, and activations quantized per token at run time. Format:
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvasir.checkpoint.model_config import read_model_config
from kvasir.checkpoint.tensors import weight_files
from kvasir.core.errors import ConfigError

FORMAT_VERSION = 1

_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def quantized_folder(source: Path, cache: Path) -> Path:
    """Return a folder under `cache` with `source`'s model in int8, created on the first call.

    Safe when several workers call it at once: each writes its own copy and the first rename wins. Raise
    ConfigError for a model that is already quantized or has no safetensors.
    """
    config = read_model_config(source)
    if config.quantization is not None:
        raise ConfigError(f"model.quantization: {source} is quantized already; set quantization: none")
    shards = weight_files(source)
    target = cache / _key(source, shards)
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=cache))
    try:
        _write(source, shards, {**config.raw, "quantization_config": _SCHEME}, draft)
        os.rename(draft, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def is_linear(name: str, dimensions: int) -> bool:
    """Return whether a checkpoint's tensor is the weight of a Linear inside a decoder layer."""
    return dimensions == 2 and ".layers." in name and name.endswith(("_proj.weight", "_fc.weight"))


def _key(source: Path, shards: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"v{FORMAT_VERSION}".encode())
    digest.update((source / "config.json").read_bytes())
    for shard in shards:
        with shard.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _write(source: Path, shards: Sequence[Path], config: dict[str, Any], draft: Path) -> None:
    # Imported here: this module is loaded with the engine, but torch only by a worker that quantizes.
    from safetensors import safe_open
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for shard in shards:
        tensors: dict[str, Any] = {}
        with safe_open(shard, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  # not a mapping
                tensor = reader.get_tensor(name)
                if is_linear(name, tensor.dim()):
                    tensors[name], tensors[f"{name}_scale"] = quantize_channels(tensor)
                else:
                    tensors[name] = tensor
        save_file(tensors, draft / shard.name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard.name))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for file in source.iterdir():
        ours = file.name in {"config.json", "model.safetensors.index.json"}
        if file.is_file() and not ours and file.suffix in {".json", ".jinja", ".model", ".txt"}:
            shutil.copyfile(file, draft / file.name)
    (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def quantize_channels(weight: Any) -> tuple[Any, Any]:
    """Return the symmetric int8 of a `[out, in]` weight, and its scales `[out, 1]` in the weight's dtype."""
    import torch

    values = weight.float()
    scales = (values.abs().amax(dim=1, keepdim=True) / 127.0).clamp(min=1e-8)
    quantized = (values / scales).round().clamp(-127, 127).to(torch.int8)
    return quantized, scales.to(weight.dtype)
