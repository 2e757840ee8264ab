"""Distinguishes an unresponsive worker from a router whose own event loop was blocked.

A frozen process, a partition and a dead link look alike: the connection stands and nothing arrives. A router
whose loop was blocked sees the same when it resumes, and must not declare every worker dead. The wait is
therefore cut into slices, and time in which this loop did not run does not count.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.ports.clock import Clock

_SLICES = 5
_GRAIN_S = 1e-6


async def wait_inactive(
    last_received_s: Callable[[], float], liveness_timeout_s: float, clock: Clock
) -> None:
    """Return once nothing arrived for `liveness_timeout_s` seconds in which this loop ran.

    `last_received_s` returns `clock`'s reading at the last arrival. After a stall of the loop, messages that
    arrived meanwhile get at least a slice of time to be read before they count as missing.
    """
    slice_s = liveness_timeout_s / _SLICES
    since = clock.now()
    while True:
        since = max(since, last_received_s())
        began = clock.now()
        wait = min(slice_s, since + liveness_timeout_s - began)
        if wait <= _GRAIN_S:
            return
        await clock.sleep(wait)
        now = clock.now()
        late = now - began - wait
        if late > slice_s / 2:
            since = max(since + late, now - liveness_timeout_s + slice_s)
