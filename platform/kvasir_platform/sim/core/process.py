"""A simulated operating-system process of a worker, which can be stopped, continued and slowed.

Code in it uses the process's clock. While it is stopped, no sleep returns and no external input arrives, but
its connections stay open: the effect of SIGSTOP, or of a swapping host.
"""

from __future__ import annotations

import asyncio

from kvasir.ports.clock import Clock


class SimProcess:
    """`kvasir.ports.clock.Clock` for the code in the process. Time itself continues while it is stopped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def frozen(self) -> bool:
        """Whether it is stopped."""
        return not self._runs.is_set()

    def freeze(self) -> None:
        """Stop it, as SIGSTOP does."""
        self._runs.clear()

    def thaw(self) -> None:
        """Continue it, as SIGCONT does."""
        self._runs.set()

    def now(self) -> float:
        """See Clock."""
        return self._clock.now()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._clock.sleep(seconds)
        await self.runs()

    async def runs(self) -> None:
        """Return at once, or when it is continued."""
        while not self._runs.is_set():
            await self._runs.wait()


class EngineClock:
    """The clock of the process's engine, on which everything takes `slowness` times as long."""

    def __init__(self, process: SimProcess) -> None:
        self.slowness = 1.0
        self._process = process

    def now(self) -> float:
        """See Clock."""
        return self._process.now()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._process.sleep(seconds * self.slowness)
