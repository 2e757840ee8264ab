"""The real clock of routers and workers.

It is the only module of the kernel that reads the time, so that tests can use a virtual clock instead.
"""

from __future__ import annotations

import asyncio
import time


class MonotonicClock:
    """`kvasir.ports.clock.Clock` over the machine's monotonic clock and the running event loop."""

    def now(self) -> float:
        """Seconds since an arbitrary point."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return no earlier than after `seconds`; yield once if that is zero or less."""
        wake_at = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        # Event loops with millisecond timers (uvloop) can wake up early.
        while (left := wake_at - time.monotonic()) > 0:  # noqa: ASYNC110 - nothing but time is awaited
            await asyncio.sleep(left)
