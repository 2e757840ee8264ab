"""Finds batches that nobody works on, and works on them, a few at a time."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from kvasir.core.errors import CapacityError
from kvasir_platform.gateway.batches.context import BatchContext
from kvasir_platform.gateway.batches.pace import LinePace
from kvasir_platform.gateway.batches.run import BatchRun, set_within

_log = logging.getLogger(__name__)

_SCAN_S = 2.0
_KEEP_S = 1.0
_SWEEP_S = 3600.0
_MOST_RUNS = 4
"""Batches of a process at a time, each with its file in memory."""


class BatchRunner:
    """The batches of one process. `serve` runs until `stop`."""

    def __init__(self, context: BatchContext, tenants: tuple[str, ...]) -> None:
        self._context = context
        self._tenants = tenants
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._stopping = False

    def wake(self) -> None:
        """There may be a new batch, or one that is cancelled."""
        self._wake.set()
        for run, _ in self._runs.values():
            run.look()

    def stop(self) -> None:
        """Start nothing more; `serve` returns when what runs has ended. Idempotent."""
        self._stopping = True
        self._wake.set()
        for run, _ in self._runs.values():
            run.stop()

    def abandon(self) -> None:
        """Give up the lines that still run."""
        for run, _ in self._runs.values():
            run.abandon()

    async def serve(self) -> None:
        """Look for batches, and work on them."""
        clock = self._context.clock
        swept_s = clock.now() - _SWEEP_S
        while not self._stopping:
            self._wake.clear()
            try:
                if clock.now() - swept_s >= _SWEEP_S:
                    swept_s = clock.now()
                    await self._context.later(self._expire)
                await self._scan()
            except CapacityError as error:
                _log.warning("batches wait: %s", error.message)
            await set_within(self._wake, _SCAN_S, clock)
        if self._runs:
            await asyncio.wait([task for _, task in self._runs.values()])

    def _expire(self) -> None:
        for tenant in self._tenants:
            self._context.files.expire(tenant)
            self._context.batches.expire(tenant)

    async def _scan(self) -> None:
        context = self._context
        for tenant, name in await context.later(context.batches.open):
            if self._stopping or len(self._runs) >= _MOST_RUNS:
                return
            if name in self._runs or tenant not in self._tenants:
                continue
            token = await context.lease_later(partial(context.lease.take, name))
            if token is None:
                continue
            run = BatchRun(context, tenant, name, token, LinePace(self._share))
            task = asyncio.create_task(self._work(run, name), name=f"batch {name}")
            if self._stopping:
                run.stop()
            self._runs[name] = (run, task)
            context.stats.running = len(self._runs)

    def _share(self) -> int:
        """Return how many lines of one batch may run."""
        return max(1, self._context.spec.concurrency // max(1, len(self._runs)))

    async def _work(self, run: BatchRun, name: str) -> None:
        try:
            if await self._held(run, name):
                self._wake.set()
        except CapacityError as error:
            _log.warning("batch %s waits: %s", name, error.message)
        except Exception:  # noqa: BLE001 - a fault of one batch must not end the others, nor the gateway
            _log.exception("the work on batch %s failed; it goes on later", name)
        finally:
            del self._runs[name]
            self._context.stats.running = len(self._runs)

    async def _held(self, run: BatchRun, name: str) -> bool:
        """Run a batch with its lease. Return whether it has ended."""
        ended, over = False, asyncio.Event()
        keeping = asyncio.create_task(self._keep(run, name, over), name=f"lease of {name}")
        try:
            ended = await run.run()
        finally:
            over.set()
            await asyncio.wait([keeping])
            await self._context.lease_later(lambda: self._context.lease.release(name, done=ended))
        return ended

    async def _keep(self, run: BatchRun, name: str, over: asyncio.Event) -> None:
        """Prolong a lease until the work is over, or stop the work once the lease is lost."""
        context = self._context
        while not over.is_set():
            try:
                held = await context.lease_later(partial(context.lease.keep, name))
            except Exception:  # noqa: BLE001 - whatever it is, another process may get the lease
                _log.exception("the lease of %s is not kept", name)
                held = False
            if not held:
                run.lose()
                return
            await set_within(over, _KEEP_S, context.clock)
