"""The real clock: what routers and workers run on outside tests.

It is the one place of the kernel that reads the time, so that everything else can be handed a virtual
clock instead.
"""

from __future__ import annotations

import asyncio
import time


class MonotonicClock:
    """`kvasir.ports.clock.Clock` over the machine's monotonic clock and the running event loop."""

    def now(self) -> float:
        """Seconds since an arbitrary point of this machine's boot."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return no earlier than `seconds` later; yields once when that is zero or less."""
        wake_at = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        # Event loops with millisecond timers (uvloop) may wake up early.
        while (left := wake_at - time.monotonic()) > 0:  # noqa: ASYNC110 - nothing but time is awaited
            await asyncio.sleep(left)
