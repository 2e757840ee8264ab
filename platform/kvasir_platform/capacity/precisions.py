"""In which precisions a plan may have the weights and the KV of a model, by hardware."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.core.errors import ConfigError
from kvasir_platform.capacity.engines import HardwareChoice, PrecisionChoice
from kvasir_platform.capacity.models import PlannedModel

_PLAIN_LAYERS = (
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "LlamaForCausalLM", "MistralForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
)  # fmt: skip
"""Architectures whose Linear layers all have names that workers quantize to int8."""
_TURING, _BLACKWELL = (7, 5), (10, 0)


def precisions(
    model: PlannedModel, hardware: Sequence[HardwareChoice], *, quantization: str, kv_dtype: str
) -> tuple[PrecisionChoice, ...]:
    """Return the precisions that plans may have; `any` compares those that the hardware computes. Raises
    ConfigError for int8 that cannot be served."""
    if quantization == "int8":
        _check_int8(model, hardware)
    fp8 = any(each.device.fp8 for each in hardware)
    weights: tuple[str, ...] = (quantization,)
    if quantization == "any":
        stored = model.config.quantization is not None
        fits = (name for name in ("fp8", "int8") if any(_gains(model, each, name) for each in hardware))
        weights = ("none",) if stored else ("none", *fits)
    numbers = ("auto", "fp8") if kv_dtype == "any" and fp8 else ("auto" if kv_dtype == "any" else kv_dtype,)
    return tuple(PrecisionChoice(each, kv) for each in weights for kv in numbers)


def precisions_on(
    model: PlannedModel, hardware: HardwareChoice, chosen: Sequence[PrecisionChoice]
) -> tuple[PrecisionChoice, ...]:
    """Return those of the precisions to compare that gain something on this hardware; one alone is taken as
    it is."""
    if len({each.quantization for each in chosen}) == 1:
        return tuple(chosen)
    return tuple(
        each for each in chosen if each.quantization == "none" or _gains(model, hardware, each.quantization)
    )


def eight_bits(model: PlannedModel, hardware: HardwareChoice) -> str | None:
    """Return how to quantize the weights to 8 bits at load on this hardware: FP8 where it is computed, else
    int8. None if they are quantized already, or neither can be."""
    if model.config.quantization is not None:
        return None
    return next((name for name in ("fp8", "int8") if _gains(model, hardware, name)), None)


def _gains(model: PlannedModel, hardware: HardwareChoice, quantization: str) -> bool:
    if quantization == "fp8":
        return hardware.device.fp8 > 0
    # Weights have as many bytes as in FP8, which is computed faster.
    return not hardware.device.fp8 and not int8_problem(model) and computes_int8(hardware)


def computes_int8(hardware: HardwareChoice) -> bool:
    """Return whether vLLM has kernels for int8 weights and activations on it: it has on CPUs, and on GPUs
    from Turing to Hopper."""
    if hardware.offered is None:
        return True
    return _TURING <= hardware.offered.gpu.capability < _BLACKWELL


def int8_problem(model: PlannedModel) -> str:
    """Return why workers cannot quantize the model to int8 when they load it, "" if they can."""
    if model.config.quantization is not None:
        return "it is quantized already"
    if "://" in model.source:
        return "its weights are streamed, and int8 quantizes those of a folder"
    if not set(model.config.architectures) & set(_PLAIN_LAYERS):
        return "at load, only dense models that are built as Llama are quantized to int8"
    return ""


def _check_int8(model: PlannedModel, hardware: Sequence[HardwareChoice]) -> None:
    if problem := int8_problem(model):
        raise ConfigError(f"--quantization int8: {model.name}: {problem}; leave it out, or set any")
    without = [each.name for each in hardware if not computes_int8(each)]
    if without:
        raise ConfigError(
            f"--quantization int8: vLLM has no int8 kernels for {', '.join(without)}; name other hardware in "
            "--gpus, or set any"
        )
