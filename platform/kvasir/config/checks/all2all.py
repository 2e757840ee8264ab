"""The backends with which ranks exchange the tokens of their experts, by vLLM's names, and what each needs.

vLLM finds a missing package when the ranks have started, and reports it as an assertion in one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

All2AllBackend = Literal[
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "flashinfer_nvlink_one_sided",
    "flashinfer_nvlink_two_sided",
    "mori_high_throughput",
    "mori_low_latency",
    "moonep",
    "nixl_ep",
]

ALL2ALL_BACKENDS: tuple[str, ...] = get_args(All2AllBackend)

WITH_MICROBATCHES = ("deepep_low_latency", "deepep_high_throughput", "nixl_ep")
"""Backends with which vLLM overlaps two halves of a batch."""

WITHOUT_BALANCING = ("moonep",)
"""Backends that cannot move experts between ranks."""


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The Python module that holds a backend's kernels, and how to install it."""

    module: str
    install: str


_VLLM_SCRIPTS = "tools/ep_kernels/README.md of vLLM's repository says how to build it"
_DEEPEP = _Kernels("deep_ep", _VLLM_SCRIPTS)
_FLASHINFER = _Kernels("flashinfer", "`pip install flashinfer-python` in the version that vLLM requires")
_MORI = _Kernels("mori", "https://github.com/ROCm/mori says how to build it, for AMD GPUs")
_KERNELS = {
    "deepep_high_throughput": _DEEPEP,
    "deepep_low_latency": _DEEPEP,
    "deepep_v2": _DEEPEP,
    "flashinfer_nvlink_one_sided": _FLASHINFER,
    "flashinfer_nvlink_two_sided": _FLASHINFER,
    "mori_high_throughput": _MORI,
    "mori_low_latency": _MORI,
    "moonep": _Kernels("moonep", "https://github.com/MoonshotAI/MoonEP says how to build it"),
    "nixl_ep": _Kernels("nixl_ep", "build NIXL with its EP kernels (examples/device/ep in its repository)"),
}

KERNEL_MODULES = tuple(sorted({each.module for each in _KERNELS.values()}))
"""Modules that some backend needs."""


def lacking_kernels(backend: str, has_module: Callable[[str], bool]) -> str | None:
    """Return what is not installed for `backend` and how to install it, as `reason; remedy`; None if nothing
    is missing."""
    kernels = _KERNELS.get(backend)
    if kernels is None or has_module(kernels.module):
        return None
    return (
        f"{backend} needs the Python module {kernels.module}, which is not installed; {kernels.install}, or "
        "set allgather_reducescatter"
    )
