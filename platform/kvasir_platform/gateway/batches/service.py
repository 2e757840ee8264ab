"""The Batch API of one process: its endpoints, and the work on batches behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvasir.config.spec.edge import GatewaySpec
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.storage import ObjectStorage, WorkLease
from kvasir.telemetry.tenant_series import BatchStats
from kvasir_platform.gateway.batches.api import BatchesApi, Handler
from kvasir_platform.gateway.batches.run import BatchContext
from kvasir_platform.gateway.batches.runner import BatchRunner
from kvasir_platform.gateway.batches.schema import ENDPOINTS
from kvasir_platform.gateway.batches.storage.local_storage import FileLease, LocalStorage
from kvasir_platform.gateway.batches.stored_batches import StoredBatches
from kvasir_platform.gateway.batches.stored_files import StoredFiles
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.tenants.callers import Callers

_THREADS = 3
_T = TypeVar("_T")


class BatchService:
    """The Batch API of the spec; without storage, its endpoints only say so. `endpoints` handle the lines of
    batches by their path, `answer` turns what they raise into an answer. Raise ConfigError for a storage that
    is not installed."""

    def __init__(
        self,
        spec: GatewaySpec,
        callers: Callers,
        endpoints: Sequence[Handler],
        *,
        answer: Callable[[Exchange, BaseException], None],
        new_id: Callable[[], str],
        clock: Clock,
        wall: Callable[[], float],
        rng: Rng,
    ) -> None:
        self.stats = BatchStats()
        self._runner: BatchRunner | None = None
        self._threads: ThreadPoolExecutor | None = None
        context: BatchContext | None = None
        if spec.batches.storage is not None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="batches")
            storage, lease = _adapters(spec, spec.batches.storage, f"{rng.getrandbits(64):016x}", clock)
            context = BatchContext(
                spec.batches,
                spec.max_body_bytes,
                storage,
                lease,
                StoredFiles(storage, spec.batches, wall),
                StoredBatches(storage, spec.batches, wall),
                dict(zip(ENDPOINTS, endpoints, strict=True)),
                callers.of_batches,
                answer,
                self._later,
                new_id,
                clock,
                wall,
                self.stats,
            )
            self._runner = BatchRunner(context, callers.tenants)
        self._serving: asyncio.Task[None] | None = None
        self.api = BatchesApi(context, callers.of, rng, self._wake)

    def start(self) -> None:
        """Begin to work on batches, on the running event loop."""
        if self._runner is not None:
            self._serving = asyncio.create_task(self._runner.serve(), name="batches")

    def stop(self) -> None:
        """Start no more lines. Idempotent."""
        if self._runner is not None:
            self._runner.stop()

    async def close(self) -> None:
        """Give up the lines that still run, and wait until the results of the others are stored."""
        if self._runner is not None:
            self._runner.stop()
            self._runner.abandon()
        if self._serving is not None:
            await self._serving
        if self._threads is not None:
            self._threads.shutdown()

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()

    def _later(self, step: Callable[[], _T]) -> Awaitable[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, step)


def _adapters(spec: GatewaySpec, named: str, process: str, clock: Clock) -> tuple[ObjectStorage, WorkLease]:
    """Return the storage and the leases of the spec. `process` names this one among those that share them."""
    storage: ObjectStorage
    if spec.batches.in_objects:
        # These libraries take megabytes that only those who use them are to pay.
        from kvasir_platform.gateway.batches.storage.object_storage import UrlStorage

        storage = UrlStorage(named)
    else:
        storage = LocalStorage(Path(named))
    if spec.batches.redis is None:
        return storage, FileLease(Path(named) / "leases")
    from kvasir_platform.gateway.batches.storage.redis_lease import RedisLease

    return storage, RedisLease(spec.batches.redis, process, clock.now)
