"""The real clock of routers and workers.

It is the only module of the kernel that reads the time, so that tests can use a virtual clock instead.
"""

from __future__ import annotations

import asyncio
import time

_RESOLUTION_S = 0.001
"""Event loops such as uvloop's have timers of milliseconds, and can wake up early by about as much."""
_LONG_S = 0.05
"""From here on, a millisecond more is at most 2 %."""


class MonotonicClock:
    """`kvasir.ports.clock.Clock` over the machine's monotonic clock and the running event loop."""

    now = staticmethod(time.monotonic)
    """Seconds since an arbitrary point; read so often in a request that it is the function itself."""

    async def sleep(self, seconds: float) -> None:
        """Return no earlier than after `seconds`; yield once if that is zero or less."""
        wake_at = time.monotonic() + seconds
        # To wake up early, and again, costs more than to wait for longer.
        await asyncio.sleep(seconds if seconds < _LONG_S else seconds + _RESOLUTION_S)
        while (left := wake_at - time.monotonic()) > 0:  # noqa: ASYNC110 - nothing but time is awaited
            await asyncio.sleep(max(left, _RESOLUTION_S))
