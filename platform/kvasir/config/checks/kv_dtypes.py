"""Names of the engine's KV cache dtypes: those that Kvasir serves, and why it refuses the others.

tests/contract/test_vllm_arguments.py compares them with vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from kvasir.config.checks.parsers import closest_matches

KvDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
SERVED: tuple[str, ...] = get_args(KvDtype)

_SAME = "KV has the model's dtype already: leave kv_dtype out, or set model.dtype"
_UNTESTED = (
    "Kvasir has not been run with it, since vLLM has kernels for it on GPUs only; use fp8, or leave kv_dtype "
    "out"
)
_MLA = "vLLM stores fp8 in this form by itself for models with sparse attention; use fp8"
_GAUDI = "it is for accelerators that Kvasir does not run on; use fp8"
REFUSED: Mapping[str, str] = {
    "float16": _SAME,
    "bfloat16": _SAME,
    "fp8_inc": _GAUDI,
    "fp8_ds_mla": _MLA,
    **dict.fromkeys(
        (
            "int8_per_token_head",
            "int4_per_token_head",
            "fp8_per_token_head",
            "nvfp4",
            "nvfp4_4over6",
            "nvfp4_ds_mla",
            "turboquant_k8v4",
            "turboquant_4bit_nc",
            "turboquant_k3v4_nc",
            "turboquant_3bit_nc",
            "ultraquant_4bit",
        ),
        _UNTESTED,
    ),
}
"""vLLM's other names, and what to do instead."""


def kv_dtype_problem(name: object) -> str | None:
    """Return why `name` is refused as engine.kv_dtype; None if it is served."""
    if name in SERVED:
        return None
    if isinstance(name, str) and name in REFUSED:
        return f"{name}: {REFUSED[name]}"
    return f"unknown KV dtype {name!r}; {closest_matches(str(name), list(SERVED))}"
