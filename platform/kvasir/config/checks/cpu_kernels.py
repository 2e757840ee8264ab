"""What vLLM 0.32 has no kernel for on CPUs, or only on some.

vLLM finds it when it loads the weights, or when the first prompts come. The engine is not imported, because
the command line checks a kvasir.yaml on machines without it. tests/contract/test_vllm_cpu_kernels.py compares
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.config.checks.quantization import declared_method

_ANYWHERE = "take the model in bfloat16, or run it on a GPU"
_WITH_AMX = (
    "take the model in bfloat16, or run it on a GPU or on a CPU with AMX (such as 4th generation Intel Xeon)"
)
_WITH_AVX512 = (
    "take the model in bfloat16 or INT8, or run it on a GPU or on a CPU with AVX-512 (such as AMD EPYC since "
    "its 4th generation)"
)
_PACKED, _NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_NEEDS_AMX = "for which vLLM's kernel needs a CPU with AMX, and this one has none"
_NEEDS_AVX512 = "for which vLLM's kernel needs a CPU with AVX-512, and this one has none"
_INT8_AT_LOAD = ("int8", "experts_int8", "int8_per_channel_weight_only")
ExpertWeights = Literal["none", "plain", "packed"]
"""The experts of a checkpoint: it has none, in 16 or 32 bits, or quantized."""
_MAMBA2 = frozenset(
    (
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Mamba2ForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "Zamba2ForCausalLM",
    )
)
"""Architectures with vLLM's MambaMixer2."""
_SHORT_CONVOLUTIONS = frozenset(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"))


@dataclass(frozen=True, slots=True)
class CpuKind:
    """What vLLM's kernels need of a CPU: whether it is one with x86 instructions, and with which of them."""

    x86: bool = True
    amx: bool = False
    avx512: bool = True


def kernel_problem(
    wanted: str, quantization: Mapping[str, Any] | None, *, experts: ExpertWeights, cpu: CpuKind
) -> tuple[str, str] | None:
    """Return why quantized weights cannot be computed with on a CPU, and what to do; None if they can, or
    there are none. `wanted` is model.quantization, and `quantization` what the checkpoint declares; `experts`
    says whether it has experts, and whether they are quantized."""
    declared = declared_method(quantization)
    stated = quantization or {}
    if wanted == "mxfp4" and not declared:
        return (
            "model.quantization is mxfp4, and vLLM has no kernel for linear layers in MXFP4 on CPUs",
            "set fp8_per_channel or int8",
        )
    if declared == "compressed-tensors" and _PACKED in _formats(stated):
        return "its linear layers are in MXFP4, for which vLLM has no kernel on CPUs", _ANYWHERE
    if declared == "modelopt_fp4" or _algorithm(stated) == "NVFP4" or _NVFP4 in _formats(stated):
        return "its linear layers are in NVFP4, for which vLLM has no kernel on CPUs", _ANYWHERE
    packed = experts == "packed" and _in_fp8(declared, stated) and not _in_fp8_blocks(declared, stated)
    if packed or (experts == "plain" and not declared and wanted == "fp8_per_channel"):
        return "its experts are in FP8 without blocks, for which vLLM has no kernel on CPUs", _ANYWHERE
    what = _computed_with_amx(wanted, declared, stated, experts=experts, x86=cpu.x86)
    if what and not cpu.amx:
        return f"{what}, {_NEEDS_AMX}", _WITH_AMX
    lacks_avx512 = _in_four_bits(declared, stated) and cpu.x86 and not cpu.avx512
    return (f"its linear layers are in INT4, {_NEEDS_AVX512}", _WITH_AVX512) if lacks_avx512 else None


def kv_dtype_on_cpu_problem(kv_dtype: str, cpu: CpuKind) -> tuple[str, str] | None:
    """Return why KV cannot be kept in this dtype on a CPU, and what to do; None if it can."""
    if not kv_dtype.startswith("fp8") or (cpu.x86 and (cpu.amx or cpu.avx512)):
        return None
    return f"its KV is in FP8, {_NEEDS_AVX512}", "leave engine.kv_dtype out"


def loses_prefixes(architectures: Sequence[str]) -> bool:
    """Whether vLLM on a CPU cannot keep the states of a prompt that a prefix cache needs. Its scan of Mamba-2
    returns the last state only, and with a prefix cache the engine ends at the first prompt longer than a
    block. With short convolutions (LFM2), it generates other tokens with a prefix cache than without."""
    return not (_MAMBA2 | _SHORT_CONVOLUTIONS).isdisjoint(architectures)


def _computed_with_amx(
    wanted: str, declared: str, quantization: Mapping[str, Any], *, experts: ExpertWeights, x86: bool
) -> str:
    """Return which weights need AMX, "" for none."""
    if declared in ("mxfp4", "gpt_oss_mxfp4"):
        return "its experts are in MXFP4"
    if _in_fp8_blocks(declared, quantization) or (wanted == "fp8_per_block" and not declared):
        return "its weights are in FP8 with a scale for each block"
    if declared == "fp8" or _algorithm(quantization) == "FP8":
        return "its weights are in FP8 with a scale for each tensor"
    if experts == "packed" and _in_four_bits(declared, quantization):
        return "its experts are in INT4"
    # On other CPUs vLLM has kernels for these without AMX.
    packed = experts == "packed" and bool(_weights(declared, quantization, "int", 8))
    if x86 and (packed or (experts == "plain" and not declared and wanted in _INT8_AT_LOAD)):
        return "its experts are in INT8"
    return ""


def _algorithm(quantization: Mapping[str, Any]) -> str:
    """Return the algorithm of a checkpoint that ModelOpt wrote, "" for others."""
    nested = quantization.get("quantization")
    stated = nested if isinstance(nested, dict) else quantization
    return str(stated.get("quant_algo") or "").upper()


def _in_fp8_blocks(declared: str, quantization: Mapping[str, Any]) -> bool:
    if declared == "fp8":
        return bool(quantization.get("weight_block_size"))
    return any(each.get("strategy") == "block" for each in _weights(declared, quantization, "float", 8))


def _in_fp8(declared: str, quantization: Mapping[str, Any]) -> bool:
    return declared == "fp8" or bool(_weights(declared, quantization, "float", 8))


def _in_four_bits(declared: str, quantization: Mapping[str, Any]) -> bool:
    if declared in ("awq", "gptq"):
        return bool(quantization.get("bits", 4) == 4)
    return bool(_weights(declared, quantization, "int", 4))


def _weights(declared: str, quantization: Mapping[str, Any], kind: str, bits: int) -> list[Mapping[str, Any]]:
    """Return what compressed-tensors says of weights of this kind."""
    if declared != "compressed-tensors":
        return []
    stated = [group.get("weights") for group in _groups(quantization)]
    numbers = [each for each in stated if isinstance(each, dict)]
    return [each for each in numbers if (each.get("type"), each.get("num_bits")) == (kind, bits)]


def _formats(quantization: Mapping[str, Any]) -> set[str]:
    return {str(each.get("format") or "") for each in (quantization, *_groups(quantization))}


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    return [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
