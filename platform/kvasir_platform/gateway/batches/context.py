"""What the work on batches is done with, in one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvasir.config.spec.edge import BatchesSpec
from kvasir.ports.clock import Clock
from kvasir.ports.storage import ObjectStorage, WorkLease
from kvasir.telemetry.tenant_series import BatchStats
from kvasir_platform.gateway.batches.stored_batches import StoredBatches
from kvasir_platform.gateway.batches.stored_files import StoredFiles
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.tenants.caller import Caller

_T = TypeVar("_T")


class Later(Protocol):
    """Runs a blocking step in a thread."""

    def __call__(self, step: Callable[[], _T]) -> Awaitable[_T]: ...


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What batches work with. `endpoints` handle a line as they handle a client's call; `callers` returns a
    tenant as the caller of its lines; `later` runs a blocking step in a thread, and `lease_later` one of the
    lease, which never waits for those of the storage; `new_id` returns request ids,
    `wall` Unix time."""

    spec: BatchesSpec
    max_line_bytes: int
    storage: ObjectStorage
    lease: WorkLease
    files: StoredFiles
    batches: StoredBatches
    endpoints: Mapping[str, Callable[[Caller, Exchange], None]]
    callers: Callable[[str], Caller]
    answer: Callable[[Exchange, BaseException], None]
    later: Later
    lease_later: Later
    new_id: Callable[[], str]
    clock: Clock
    wall: Callable[[], float]
    stats: BatchStats
