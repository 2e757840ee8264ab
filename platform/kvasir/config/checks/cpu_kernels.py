"""What vLLM 0.32 has no kernel for on CPUs, or only on some.

vLLM finds it when it loads the weights, or when the first prompts come. The engine is not imported, because
the command line checks a kvasir.yaml on machines without it. tests/contract/test_vllm_cpu_kernels.py compares
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.config.checks.quantization import declared_method

_ANYWHERE = "take the model in bfloat16, or run it on a GPU"
_WITH_AMX = (
    "take the model in bfloat16, or run it on a GPU or on a CPU with AMX (such as 4th generation Intel Xeon)"
)
_PACKED = "mxfp4-pack-quantized"
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


def mxfp4_problem(
    wanted: str, quantization: Mapping[str, Any] | None, *, amx: bool
) -> tuple[str, str] | None:
    """Return why weights in MXFP4 cannot be computed with on a CPU with or without AMX, and what to do; None
    if they can, or there are none. `wanted` is model.quantization, and `quantization` what the checkpoint
    declares."""
    declared = declared_method(quantization)
    if declared in ("mxfp4", "gpt_oss_mxfp4"):
        why = "its experts are in MXFP4, for which vLLM's kernel needs a CPU with AMX, and this one has none"
        return None if amx else (why, _WITH_AMX)
    if wanted == "mxfp4" and not declared:
        return (
            "model.quantization is mxfp4, and vLLM has no kernel for linear layers in MXFP4 on CPUs",
            "set fp8_per_channel or int8",
        )
    if declared == "compressed-tensors" and _PACKED in _formats(quantization or {}):
        return "its linear layers are in MXFP4, for which vLLM has no kernel on CPUs", _ANYWHERE
    return None


def loses_prefixes(architectures: Sequence[str]) -> bool:
    """Whether vLLM on a CPU cannot keep the states of a prompt that a prefix cache needs. Its scan of Mamba-2
    returns the last state only, and with a prefix cache the engine ends at the first prompt longer than a
    block. With short convolutions (LFM2), it generates other tokens with a prefix cache than without."""
    return not (_MAMBA2 | _SHORT_CONVOLUTIONS).isdisjoint(architectures)


def _formats(quantization: Mapping[str, Any]) -> set[str]:
    groups = quantization.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else ()
    stated = [quantization, *(group for group in each if isinstance(group, dict))]
    return {str(group.get("format") or "") for group in stated}
