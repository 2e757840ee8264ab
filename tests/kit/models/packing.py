"""Weights of Linear layers in the formats of quantized checkpoints, as vLLM reads them.

Formats: https://github.com/casper-hansen/AutoAWQ, https://github.com/ModelCloud/GPTQModel and
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

GROUP = 64
_PACKED = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Pack = Callable[[str, Any], dict[str, Any]]


def _four_bits(weight: Any) -> tuple[Any, Any]:
    """Return the symmetric integers from 0 to 15 of an `[out, in]` weight, and its scales `[out, groups]`."""
    import torch

    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 7.0).clamp(min=1e-6)
    integers = (groups / scales).round().clamp(-8, 7).to(torch.int32) + 8
    return integers.reshape(weight.shape), scales.squeeze(-1)


def _pack_rows(integers: Any, order: tuple[int, ...] = tuple(range(_PACKED))) -> Any:
    """Pack eight integers of the last dimension into one 32-bit integer."""
    import torch

    parts = integers.reshape(*integers.shape[:-1], -1, _PACKED).to(torch.int64)
    packed = sum(parts[..., at] << (4 * place) for place, at in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def _awq(name: str, weight: Any) -> dict[str, Any]:
    import torch

    integers, scales = _four_bits(weight)
    zeros = torch.full((scales.shape[1], weight.shape[0]), 8, dtype=torch.int32)
    return {
        f"{name}.qweight": _pack_rows(integers.t().contiguous(), _AWQ_ORDER),
        f"{name}.qzeros": _pack_rows(zeros, _AWQ_ORDER),
        f"{name}.scales": scales.t().contiguous().half(),
    }


def _gptq(name: str, weight: Any) -> dict[str, Any]:
    import torch

    integers, scales = _four_bits(weight)
    # GPTQ stores zero points less one.
    zeros = torch.full((scales.shape[1], weight.shape[0]), 7, dtype=torch.int32)
    return {
        f"{name}.qweight": _pack_rows(integers).t().contiguous(),
        f"{name}.qzeros": _pack_rows(zeros),
        f"{name}.scales": scales.t().contiguous().half(),
        f"{name}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _w4a16(name: str, weight: Any) -> dict[str, Any]:
    import torch

    integers, scales = _four_bits(weight)
    return {
        f"{name}.weight_packed": _pack_rows(integers),
        f"{name}.weight_scale": scales.bfloat16(),
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _fp8(name: str, weight: Any) -> dict[str, Any]:
    import torch

    scales = (weight.abs().amax(dim=1, keepdim=True) / 448.0).clamp(min=1e-8)
    return {
        f"{name}.weight": (weight / scales).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scales.float(),
    }


def _int8(name: str, weight: Any) -> dict[str, Any]:
    import torch

    scales = (weight.abs().amax(dim=1, keepdim=True) / 127.0).clamp(min=1e-8)
    return {
        f"{name}.weight": (weight / scales).round().to(torch.int8),
        f"{name}.weight_scale": scales.bfloat16(),
    }


def _compressed(
    style: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights)}
    if inputs is not None:
        group["input_activations"] = dict(inputs)
    return {
        "quant_method": "compressed-tensors",
        "format": style,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _numbers(
    bits: int, kind: str, strategy: str, *, dynamic: bool, group: int | None = None
) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": True,
        "dynamic": dynamic,
    }  # fmt: skip


PACKERS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "w4a16": (_w4a16, _compressed("pack-quantized", _numbers(4, "int", "group", dynamic=False, group=GROUP))),
    "fp8": (
        _fp8,
        _compressed(
            "float-quantized",
            _numbers(8, "float", "channel", dynamic=False),
            _numbers(8, "float", "token", dynamic=True),
        ),
    ),
    "int8": (
        _int8,
        _compressed(
            "int-quantized",
            _numbers(8, "int", "channel", dynamic=False),
            _numbers(8, "int", "token", dynamic=True),
        ),
    ),
}
"""How a weight is stored, and the configuration that says so, by format."""
