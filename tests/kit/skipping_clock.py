"""A clock beside real I/O that never waits: time that is slept is skipped."""

from __future__ import annotations

import asyncio
import time


class SkippingClock:
    """`kvasir.ports.clock.Clock`. `slept` are all the waits that were asked for, in seconds."""

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
        """Wait until that many waits have been asked for, in all."""
        while len(self.slept) < count:
            await self._sleeps.wait()

    def skip(self, seconds: float) -> None:
        """Let time go on at once."""
        self._skipped_s += max(0.0, seconds)
