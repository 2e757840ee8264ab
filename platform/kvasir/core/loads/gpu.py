"""What a GPU of a worker reports of its use.

A GPU that is busy all the time can still be used badly: `busy` is the time in which any kernel ran. How much
of its multiprocessors and of its memory bandwidth worked tells whether prefill, which computes, or decode,
which reads memory, has room left.
"""

from __future__ import annotations

from kvasir.core.values import value

MOST_GPUS = 64
"""The most GPUs of one worker."""


@value
class GpuLoad:
    """One GPU, by its place among those that its worker may use. `busy` is the fraction of time in which a
    kernel ran, `sm_active` the fraction of its multiprocessors that were busy, `dram_active` the fraction of
    its memory bandwidth that was used, the last two None where the driver does not tell (before Hopper).
    Memory is in bytes, power in watts."""

    index: int
    busy: float = 0.0
    memory_used: int = 0
    memory_total: int = 0
    power_w: float = 0.0
    sm_active: float | None = None
    dram_active: float | None = None
