"""The Batch API of one process: its endpoints, and the work on batches behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvasir.config.spec.edge import GatewaySpec
from kvasir.core.errors import CapacityError
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.storage import ObjectStorage, WorkLease
from kvasir.telemetry.tenant_series import BatchStats
from kvasir_platform.gateway.batches.api import BatchesApi, Handler
from kvasir_platform.gateway.batches.context import BatchContext
from kvasir_platform.gateway.batches.runner import BatchRunner
from kvasir_platform.gateway.batches.schema import ENDPOINTS
from kvasir_platform.gateway.batches.storage.local_storage import FileLease, LocalStorage
from kvasir_platform.gateway.batches.stored_batches import StoredBatches
from kvasir_platform.gateway.batches.stored_files import StoredFiles
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.tenants.callers import Callers

_log = logging.getLogger(__name__)

_THREADS = 3
_LEASE_THREADS = 4
"""As many as there are batches of a process at a time: no lease waits for another's."""
_T = TypeVar("_T")


class BatchService:
    """The Batch API of the spec; without storage, its endpoints only say so. `endpoints` handle the lines of
    batches by their path, `answer` turns what they raise into an answer. Raise ConfigError for a storage that
    cannot be used."""

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
        self._lease_threads: ThreadPoolExecutor | None = None
        self._check: Callable[[], None] | None = None
        context: BatchContext | None = None
        if spec.batches.storage is not None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="batches")
            self._lease_threads = ThreadPoolExecutor(_LEASE_THREADS, thread_name_prefix="batch-leases")
            process = f"{rng.getrandbits(64):016x}"
            storage, lease, self._check = _adapters(spec, spec.batches.storage, process, clock)
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
                partial(_later, self._threads),
                partial(_later, self._lease_threads),
                new_id,
                clock,
                wall,
                self.stats,
            )
            self._runner = BatchRunner(context, callers.tenants)
        self._serving: asyncio.Task[None] | None = None
        self.api = BatchesApi(context, callers.of, rng, self._wake)

    async def check(self) -> None:
        """Raise ConfigError if the storage is none that waiting would mend, such as a bucket that does not
        exist. One that does not answer is only logged: its batches wait, and other requests do not."""
        if self._check is not None:
            try:
                await _later(self._threads, self._check)
            except CapacityError as error:
                _log.warning("files and batches wait: %s", error.message)

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
        for threads in (self._threads, self._lease_threads):
            if threads is not None:
                threads.shutdown()

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()


def _later(threads: ThreadPoolExecutor | None, step: Callable[[], _T]) -> Awaitable[_T]:
    return asyncio.get_running_loop().run_in_executor(threads, step)


def _adapters(
    spec: GatewaySpec, named: str, process: str, clock: Clock
) -> tuple[ObjectStorage, WorkLease, Callable[[], None] | None]:
    """Return the storage and the leases of the spec, and what checks them at the start. `process` names this
    one among those that share them."""
    batches = spec.batches
    storage: ObjectStorage
    lease: WorkLease
    check: Callable[[], None] | None = None
    if batches.in_objects:
        # These libraries take megabytes that only those who use them are to pay.
        from kvasir_platform.gateway.batches.storage.s3_lease import CALL_S, S3Lease
        from kvasir_platform.gateway.batches.storage.s3_storage import S3Storage

        storage = S3Storage.at(named, batches.s3)
        quick = S3Storage.at(named, batches.s3, limit_s=CALL_S)
        lease = S3Lease(quick, process, clock.now)
        check = partial(quick.check_writes, process, conditional=batches.redis is None)
    else:
        storage, lease = LocalStorage(Path(named)), FileLease(Path(named) / "leases")
    if batches.redis is not None:
        from kvasir_platform.gateway.batches.storage.redis_lease import RedisLease

        lease = RedisLease(batches.redis, process, clock.now)
    return storage, lease, check
