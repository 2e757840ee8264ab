"""The operating system's view of a simulated worker: a process that can be stopped, go on, and run slowly.

What runs in it takes its time from here. While the process is stopped no sleep returns and nothing that it
waits for from outside reaches it, though its connections stay open: what SIGSTOP does, and a host that
swaps.
"""

from __future__ import annotations

import asyncio

from kvasir.ports.clock import Clock


class SimProcess:
    """`kvasir.ports.clock.Clock` for what runs in the process. Time itself goes on while it is stopped."""

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
        """Let it go on, as SIGCONT does."""
        self._runs.set()

    def now(self) -> float:
        """See Clock."""
        return self._clock.now()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._clock.sleep(seconds)
        await self.runs()

    async def runs(self) -> None:
        """Return at once, or when it goes on."""
        while not self._runs.is_set():
            await self._runs.wait()


class EngineClock:
    """The clock of the process's engine, for which everything takes `slowness` times as long."""

    def __init__(self, process: SimProcess) -> None:
        self.slowness = 1.0
        self._process = process

    def now(self) -> float:
        """See Clock."""
        return self._process.now()

    async def sleep(self, seconds: float) -> None:
        """See Clock."""
        await self._process.sleep(seconds * self.slowness)
