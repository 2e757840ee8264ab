"""A clock for use beside real I/O whose sleeps return without waiting."""

from __future__ import annotations

import asyncio
import time


class SkippingClock:
    """`kvasir.ports.clock.Clock`. `slept` lists all requested sleeps, in seconds."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._skipped_s = 0.0
        self._sleeps = asyncio.Event()

    def now(self) -> float:
        return time.monotonic() + self._skipped_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.skip(seconds)
        sleeps, self._sleeps = self._sleeps, asyncio.Event()
        sleeps.set()
        await asyncio.sleep(0)

    async def until(self, count: int) -> None:
        """Wait until that many sleeps were requested in total."""
        while len(self.slept) < count:
            await self._sleeps.wait()

    def skip(self, seconds: float) -> None:
        """Advance time at once."""
        self._skipped_s += max(0.0, seconds)
