"""Names of the engine's quantization methods, and whether one fits a checkpoint.

They are listed here because the command line checks a kvasir.yaml on machines without vLLM.
tests/contract/test_vllm_arguments.py compares them with vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Quantization = Literal[
    "none", "int8",
    "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8", "experts_int8",
    "fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "gpt_oss_mxfp4", "gptq", "gptq_marlin",
    "humming", "inc", "int8_per_channel_weight_only", "modelopt", "modelopt_fp4", "modelopt_mixed",
    "modelopt_mxfp8", "moe_wna16", "mxfp4", "mxfp8", "nvfp4_per_token", "quark", "torchao",
]  # fmt: skip
"""`none` and `int8` are Kvasir's; the others are vLLM's."""

ENGINE_METHODS = tuple(name for name in get_args(Quantization) if name not in ("none", "int8"))

AT_LOAD = (
    "fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "int8_per_channel_weight_only", "mxfp4",
    "mxfp8", "nvfp4_per_token", "experts_int8",
)  # fmt: skip
"""Methods that quantize a checkpoint that is not quantized while it is loaded."""

WITHOUT_CPU_KERNEL = ("fp8", "fp8_per_tensor", "mxfp8", "nvfp4_per_token")
"""Methods that vLLM's CPU build accepts and cannot run."""

_MARLIN = ("moe_wna16", "humming")
_READERS: Mapping[str, tuple[str, ...]] = {
    "auto-round": ("inc",),
    "awq": ("awq", "auto_awq", "awq_marlin", *_MARLIN),
    "compressed-tensors": ("compressed-tensors", "humming"),
    "fp8": ("fp8", "deepseek_v4_fp8", "humming"),
    "gptq": ("gptq", "auto_gptq", "gptq_marlin", *_MARLIN),
    "modelopt": ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "humming"),
    "mxfp4": ("mxfp4", "gpt_oss_mxfp4", "humming"),
}
"""The methods that read a checkpoint, by the `quant_method` of its config.json; others have the same name."""


def declared_method(quantization: Mapping[str, Any] | None) -> str:
    """Return the method that a checkpoint's `quantization_config` declares, "" for none."""
    if quantization is None:
        return ""
    producer = quantization.get("producer")
    named = quantization.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)
    return str(named or "unnamed").lower().replace("compressed_tensors", "compressed-tensors")


def reads_checkpoint(declared: str) -> bool:
    """Return whether vLLM reads a checkpoint that declares this method ("" for none). Those that it calls
    deprecated are not read."""
    # vLLM says what it makes of a configuration without a name.
    return declared in ("", "unnamed", *_READERS, *ENGINE_METHODS)


def quantization_problem(wanted: str, declared: str) -> tuple[str, str] | None:
    """Return why model.quantization `wanted` does not fit a checkpoint that declares the method `declared`
    ("" for an unquantized one), and what to do; None if it fits."""
    if wanted == "none" or (not declared and wanted in ("int8", *AT_LOAD)):
        return None
    if not declared:
        return (
            f"model.quantization {wanted} reads quantized weights, and those of the model are not quantized",
            f"set none, or quantize at load with {', '.join(AT_LOAD)} or int8",
        )
    readers = _READERS.get(declared, (declared,))
    if wanted in readers:
        return None
    return (
        f"model.quantization is {wanted}, and the model is quantized already, with {declared}",
        "set none, which reads the model as it is, or take the unquantized model",
    )
