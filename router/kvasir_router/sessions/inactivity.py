"""Distinguishes an unresponsive worker from a router whose own event loop was blocked.

A frozen process, a partition and a dead link look alike: the connection stands and nothing arrives. A router
whose loop was blocked sees the same when it resumes, and must not declare every worker dead. The wait is
therefore cut into slices, and time in which this loop did not run does not count.

Where one worker has fallen silent, the next one may do so too, and a stream that moves from the first to the
second would wait for both timeouts. So the others are waited for less long for some time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.ports.clock import Clock

_SLICES = 5
_GRAIN_S = 1e-6
HURRY_S = 5.0


class SessionPatience:
    """How long the sessions of one router wait for a message: `liveness_timeout_s`, and `hurried_s` for
    HURRY_S after one of them waited in vain. `now` reads a clock in seconds."""

    def __init__(self, liveness_timeout_s: float, hurried_s: float, now: Callable[[], float]) -> None:
        self._timeout_s = liveness_timeout_s
        self._hurried_s = min(hurried_s, liveness_timeout_s)
        self._now = now
        self._until_s = float("-inf")

    def timeout_s(self) -> float:
        """Return the timeout that applies now."""
        return self._hurried_s if self._now() < self._until_s else self._timeout_s

    def hurry(self) -> None:
        """A worker has fallen silent."""
        self._until_s = self._now() + HURRY_S


async def wait_inactive(
    last_received_s: Callable[[], float], timeout_s: Callable[[], float], clock: Clock
) -> float:
    """Wait until nothing arrived for `timeout_s()` seconds in which this loop ran; return that timeout.

    `last_received_s` returns `clock`'s reading at the last arrival. After a stall of the loop, messages that
    arrived meanwhile get at least a slice of time to be read before they count as missing.
    """
    since = clock.now()
    while True:
        liveness_timeout_s = timeout_s()
        slice_s = liveness_timeout_s / _SLICES
        since = max(since, last_received_s())
        began = clock.now()
        wait = min(slice_s, since + liveness_timeout_s - began)
        if wait <= _GRAIN_S:
            return liveness_timeout_s
        await clock.sleep(wait)
        now = clock.now()
        late = now - began - wait
        if late > slice_s / 2:
            since = max(since + late, now - liveness_timeout_s + slice_s)
