"""Clocks that tests control. For use beside real I/O there is `tests.kit.skipping_clock`."""

from __future__ import annotations

import asyncio


class StillClock:
    """`kvasir.ports.clock.Clock` that returns `at`, in seconds, until the test changes it. Sleeping fails."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nothing here sleeps, and {seconds} s were asked for")


class SteppedClock(StillClock):
    """Advances only in `sleep`, which returns at once. `slept` lists all sleeps, in seconds."""

    def __init__(self, at: float = 0.0) -> None:
        super().__init__(at)
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds
        await asyncio.sleep(0)
