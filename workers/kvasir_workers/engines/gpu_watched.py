"""Adds what its GPUs do to the load of an engine, read beside the engine every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from kvasir.core.identity import WorkerIdentity
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.requests import EngineLoad
from kvasir.ports.clock import Clock
from kvasir.ports.engine import Engine, StepSink
from kvasir_workers.engines.delegating import DelegatingEngine

READ_S = 5.0
"""Seconds between two readings, over which fractions are taken."""


class GpuReader(Protocol):
    """Reads the GPUs of this process; each call may take milliseconds."""

    def read(self) -> tuple[GpuLoad, ...]: ...

    def close(self) -> None: ...


class GpuWatchedEngine(DelegatingEngine):
    """An Engine (port: kvasir.ports.engine) whose `load` has its GPUs. `open_gpus` is called with their
    number once the engine has started, in a thread, as each reading is; None: there is nothing to read."""

    def __init__(self, engine: Engine, open_gpus: Callable[[int], GpuReader | None], clock: Clock) -> None:
        super().__init__(engine)
        self._open_gpus = open_gpus
        self._clock = clock
        self._gpus: tuple[GpuLoad, ...] = ()
        self._watch: asyncio.Task[None] | None = None

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine."""
        identity = await super().start(sink, worker_id=worker_id, epoch=epoch)
        reader = await asyncio.to_thread(self._open_gpus, identity.hardware.devices)
        if reader is not None:
            self._watch = asyncio.create_task(self._read(reader), name="gpus")
        return identity

    def load(self) -> EngineLoad:
        """See Engine."""
        load = super().load()
        return replace(load, gpus=self._gpus) if self._gpus else load

    async def stop(self) -> None:
        """See Engine."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await super().stop()

    async def _read(self, reader: GpuReader) -> None:
        try:
            while True:
                await self._clock.sleep(READ_S)
                self._gpus = await asyncio.to_thread(reader.read)
        finally:
            await asyncio.to_thread(reader.close)
