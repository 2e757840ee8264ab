"""Tells a worker that has fallen silent from a router that was too busy to listen.

A frozen process, a partition and a dead link all look alike from here: the connection stands and nothing
comes. A router whose own loop stood still sees exactly the same when it wakes, and must not take every
worker for dead. So the wait is cut into slices, and time in which this loop did not run is nobody's silence.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.ports.clock import Clock

_SLICES = 5
_GRAIN_S = 1e-6


async def wait_inactive(
    last_received_s: Callable[[], float], liveness_timeout_s: float, clock: Clock
) -> None:
    """Return once nothing was heard for `liveness_timeout_s` seconds in which this loop was awake.

    `last_received_s` gives `clock`'s reading when something was heard last. After a stall of the loop, what
    came meanwhile gets at least a slice of the time to be read before it counts as missing.
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
