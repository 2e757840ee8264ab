"""Effects on requests when a worker joins, loses its connection, drains or is lost.

A worker that cannot be reached keeps its requests for `migrate_s`: most connections resume within that time,
with everything that ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Protocol

from kvasir.core.errors import KvasirError, UpstreamError
from kvasir.core.identity import WorkerIdentity
from kvasir_router.fleet.work import Worker
from kvasir_router.requests.events import (
    MembershipEvent,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
    WorkerRestored,
)
from kvasir_router.requests.state import MachineLimits

_LEAST_INTERVAL_S = 0.25
"""Least time between two attempts to move the requests of a worker."""


class MemberFleet(Protocol):
    """The workers of a machine."""

    @property
    def workers(self) -> Mapping[str, Worker]: ...

    def add(self, worker_id: str, identity: WorkerIdentity, now: float) -> None: ...

    def remove(self, worker_id: str) -> Worker | None: ...

    def mark(
        self,
        worker_id: str,
        *,
        interrupted: bool | None = None,
        draining: str | None = None,
        now: float | None = None,
    ) -> None: ...


class Membership(ABC):
    """Keeps the fleet's workers, and moves the requests of those that are lost or cannot be reached."""

    def __init__(self, members: MemberFleet, limits: MachineLimits) -> None:
        self._members = members
        self._migrate_s = limits.migrate_s
        self._ghost_ttl_s = limits.ghost_ttl_s
        # Workers whose connection is broken, and when their requests move to other workers.
        self._evacuations: dict[str, float] = {}

    def next_due(self) -> float | None:
        """When `tick` is due."""
        return min(self._evacuations.values(), default=None)

    def tick(self, now: float) -> None:
        """Evacuate the workers that are due."""
        for worker_id in [worker_id for worker_id, when in self._evacuations.items() if when <= now]:
            self._evacuate(worker_id, now)

    def forget_ghosts(self, now: float) -> None:
        """Drop aborted legs whose last delta never came."""
        for worker in self._members.workers.values():
            worker.forget_ghosts(now - self._ghost_ttl_s)

    def handle(self, event: MembershipEvent, now: float) -> None:
        """Handle one event; events of unknown workers are ignored."""
        known = event.worker_id in self._members.workers
        match event:
            case WorkerReady(worker_id, identity):
                self._ready(worker_id, identity, now)
            case WorkerLost(worker_id, reason):
                self._lost(worker_id, reason, now)
            case WorkerInterrupted(worker_id) if known:
                self._interrupted(worker_id, now)
            case WorkerDraining(worker_id, reason) if known:
                self._members.mark(worker_id, draining=reason)
            case WorkerRestored(worker_id) if known:
                self._members.mark(worker_id, draining="")

    def _ready(self, worker_id: str, identity: WorkerIdentity, now: float) -> None:
        known = self._members.workers.get(worker_id)
        if known is not None and known.identity != identity:
            self._lost(worker_id, "replaced by another instance of the worker", now)
            known = None
        if known is None:
            self._members.add(worker_id, identity, now)
        else:
            self._resumed(worker_id, now)

    def _interrupted(self, worker_id: str, now: float) -> None:
        """A draining worker does not come back, so it is evacuated at once. So are requests that have waited
        for a token since they lost another worker."""
        self._members.mark(worker_id, interrupted=True, now=now)
        worker = self._members.workers[worker_id]
        leaving = bool(worker.draining)
        self._evacuations[worker_id] = now if leaving else now + self._migrate_s
        waiting = [each for each in dict.fromkeys(worker.legs.values()) if self._waits_longest(each)]
        if leaving:
            self._evacuate(worker_id, now)
        elif waiting:
            self._hurry(now)
            self._take_away(worker_id, waiting, now)

    def _resumed(self, worker_id: str, now: float) -> None:
        self._evacuations.pop(worker_id, None)
        self._members.mark(worker_id, interrupted=False, now=now)

    def _lost(self, worker_id: str, reason: str, now: float) -> None:
        worker = self._members.remove(worker_id)
        if worker is None:
            return
        self._evacuations.pop(worker_id, None)
        self._forget(worker)
        error = UpstreamError(f"worker {worker_id} was lost: {reason}", code="worker_lost")
        for request_id in dict.fromkeys(worker.legs.values()):
            self._move(request_id, error, worker_id, now)

    def _evacuate(self, worker_id: str, now: float) -> None:
        worker = self._members.workers[worker_id]
        self._take_away(worker_id, dict.fromkeys(worker.legs.values()), now)
        if worker.legs:
            self._evacuations[worker_id] = now + max(self._migrate_s, _LEAST_INTERVAL_S)
        else:
            del self._evacuations[worker_id]

    def _take_away(self, worker_id: str, request_ids: Iterable[str], now: float) -> None:
        error = UpstreamError(f"worker {worker_id} cannot be reached", code="worker_lost")
        for request_id in request_ids:
            if self._take_back(request_id, worker_id, now):
                self._move(request_id, error, worker_id, now)

    def _waits_longest(self, _request_id: str) -> bool:
        """Return whether the request has had no token since it lost another worker."""
        return False

    def _hurry(self, _now: float) -> None:  # noqa: B027 - most requests need nothing
        """Requests that have waited for one worker have lost another: let any worker serve that can."""

    @abstractmethod
    def _forget(self, worker: Worker) -> None:
        """Drop what requests hold on the worker."""

    @abstractmethod
    def _take_back(self, request_id: str, worker_id: str, now: float) -> bool:
        """Abort what runs of the request on the worker. Return False, without any change, if no other worker
        could serve it."""

    @abstractmethod
    def _move(self, request_id: str, error: KvasirError, worker_id: str, now: float) -> None:
        """Start the request on another worker, or fail it with `error`."""
