"""Clocks that a test moves. `tests.kit.skipping_clock` runs beside real I/O."""

from __future__ import annotations

import asyncio


class StillClock:
    """`kvasir.ports.clock.Clock` that reads `at`, in seconds, until the test sets it. Sleeping fails."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nothing here sleeps, and {seconds} s were asked for")


class SteppedClock(StillClock):
    """Moves only in `sleep`, at once. `slept` are all its sleeps, in seconds."""

    def __init__(self, at: float = 0.0) -> None:
        super().__init__(at)
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds
        await asyncio.sleep(0)
