"""In which precision weights are stored, and in which they are computed.

They differ: a device without units for the stored width widens the weights first, so that 4-bit weights (AWQ,
GPTQ, MXFP4) on Hopper are read as 4 bits and computed in 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import count
from kvasir.performance.device import Device
from kvasir.performance.work import ModelWork
from kvasir.sizing.shape import EngineShape, element_bytes
from kvasir.sizing.weights import WeightKind, WeightPart, rank_weights

_GROUP_BITS = 0.5
"""Bits of each parameter for scales and zero points of groups of 128 (AWQ, GPTQ): 20 to 32 bits for each."""
_MXFP4_BITS = 4.25
"""Four bits, and an exponent of eight for each 32 (OCP Microscaling Formats, 1.0)."""
_NVFP4_BITS = 4.5
"""Four bits, and a scale of eight for each 16."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Mean bytes of a parameter as stored, of experts and of all else, and the dtype of the arithmetic."""

    weight_bytes: float
    expert_bytes: float
    compute_dtype: str


def precision_of(
    config: ModelConfig,
    work: ModelWork,
    shape: EngineShape,
    device: Device,
    weights: Sequence[WeightPart] = (),
) -> Precision:
    """Return the precision of a model that an engine of this shape serves on `device`: from the headers of
    its checkpoint (`weights`), else from what config.json says of its quantization."""
    compute = "fp8" if device.fp8 and _computes_fp8(config, shape) else _half(shape)
    experts = work.expert * work.experts * work.expert_layers
    if not weights:
        bits = _stated_bits(config, shape)
        # Outside of experts, MXFP4 checkpoints are in 16 bits.
        dense = element_bytes(shape.dtype) if _method(config) == "mxfp4" and experts else bits / 8
        return Precision(dense, bits / 8, compute)
    alone = replace(shape, tensor=1, pipeline=1, data=1, expert_parallel=False)
    routed = [part for part in weights if part.kind is WeightKind.EXPERT]
    held = sum(rank_weights(config, routed, alone)) if routed and experts else 0
    total = sum(rank_weights(config, weights, alone))
    rest = work.parameters - (experts if held else 0.0)
    dense = (total - held) / rest if rest else float(element_bytes(shape.dtype))
    return Precision(dense, held / experts if held else dense, compute)


def _half(shape: EngineShape) -> str:
    return "float32" if shape.dtype == "float32" else "bfloat16"


def _method(config: ModelConfig) -> str:
    return str((config.quantization or {}).get("quant_method", "")).lower()


def _computes_fp8(config: ModelConfig, shape: EngineShape) -> bool:
    """Whether weights and activations are both FP8."""
    if config.quantization is None:
        return shape.quantization == "fp8"
    stated = config.quantization
    if _method(config) in ("fp8", "fbgemm_fp8"):
        return True
    if "FP8" in str(stated.get("quant_algo") or _nested(stated, "quantization").get("quant_algo") or ""):
        return True
    return any(
        _nested(group, "weights").get("type") == "float"
        and count(_nested(group, "weights"), "num_bits") == 8
        and bool(group.get("input_activations"))
        for group in _groups(stated)
    )


def _stated_bits(config: ModelConfig, shape: EngineShape) -> float:
    """Return the bits of a parameter in quantized layers."""
    stated = config.quantization
    if stated is None:
        return 8.0 if shape.quantization != "none" else 8.0 * element_bytes(shape.dtype)
    method, algorithm = _method(config), str(stated.get("quant_algo") or "")
    if method == "mxfp4":
        return _MXFP4_BITS
    if "NVFP4" in algorithm or "NVFP4" in str(_nested(stated, "quantization").get("quant_algo") or ""):
        return _NVFP4_BITS
    bits = count(stated, "bits", "w_bit", "weight_bits")
    bits = bits or max((count(_nested(group, "weights"), "num_bits") for group in _groups(stated)), default=0)
    if not bits and stated.get("load_in_4bit") is True:
        bits = 4
    return float(bits or 8) + (_GROUP_BITS if 0 < bits < 8 else 0.0)


def _groups(stated: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the groups of layers of a compressed-tensors checkpoint."""
    groups = stated.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else ()
    return tuple(each for each in found if isinstance(each, dict))


def _nested(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}
