"""Pool sizes over Ray Serve: kvasir.ports.scaler.Scaler.

Serve takes a number of replicas, and chooses itself which of them to stop. So a retiring replica is named in
the store of Ray's head: it drains and ends, and once Serve reports it gone, the number is lowered by one. In
between, Serve starts a replacement, which the lower number stops. Replicas that do not serve yet need no
drain: Serve stops those first.

KubeRay is not involved: Ray's own autoscaler creates and removes the pods that Serve's replicas request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvasir.core.errors import UpstreamError
from kvasir.core.membership import MemberRecord
from kvasir.ports.clock import Clock
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.cluster.ray.pool_status import RUNNING, ReplicaRow

log = logging.getLogger(__name__)
T = TypeVar("T")

STOPPING = "STOPPING"
_REASON = "the pool is to be smaller"


class ScalablePools(Protocol):
    """The part of kvasir_platform.cluster.ray.pools.RayPools that is needed."""

    def names(self) -> Sequence[str]: ...

    def wanted(self, pool: str) -> int: ...

    def replicas(self, pool: str) -> list[ReplicaRow]: ...

    def members(self) -> Mapping[str, MemberRecord]: ...

    def ask_to_leave(self, worker_id: str, reason: str) -> None: ...

    def scale(self, pool: str, replicas: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Leaving:
    pool: str
    since_s: float


@dataclass(frozen=True, slots=True)
class _Seen:
    pool: str
    state: ReplicaState
    since_s: float


class RayScaler:
    """Call every method from the thread that drives Ray. `failures` are the exceptions that Ray raises when
    it does not answer."""

    def __init__(self, pools: ScalablePools, clock: Clock, failures: tuple[type[Exception], ...]) -> None:
        self._pools = pools
        self._clock = clock
        self._failures = failures
        self._leaving: dict[str, _Leaving] = {}
        self._seen: dict[str, _Seen] = {}

    def observe(self) -> Sequence[Replica]:
        """See Scaler."""
        return self._asking(self._observe)

    def start(self, pool: str, count: int) -> None:
        """See Scaler."""
        if count > 0:
            self._asking(lambda: self._pools.scale(pool, self._pools.wanted(pool) + count))

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        """See Scaler."""
        if pool in self._pools.names():
            self._asking(lambda: self._retire(pool, replica_ids))

    def follow(self) -> None:
        """Lower the requested number for retired replicas that are gone. Call often; cheap if none is
        retiring. Raises UpstreamError."""
        if self._leaving:
            self._asking(lambda: self._follow({p: self._pools.replicas(p) for p in self._pools.names()}))

    def _observe(self) -> list[Replica]:
        now, members = self._clock.now(), self._pools.members()
        rows = {pool: self._pools.replicas(pool) for pool in self._pools.names()}
        self._follow(rows)
        found: list[Replica] = []
        for pool, own in rows.items():
            spare = self._spare(pool, own)
            for row in own:
                member = members.get(row.replica_id)
                state = ReplicaState.LEAVING if row.replica_id in spare else self._state(row, member)
                found.append(self._look(row.replica_id, pool, state, now, member))
            staying = sum(row.state != STOPPING for row in own)
            for number in range(self._pools.wanted(pool) - staying):
                # Requested and not started: Serve has not handled it, or there is no room.
                found.append(self._look(f"{pool}?{number}", pool, ReplicaState.STARTING, now, None))
        present = {each.replica_id for each in found}
        self._seen = {name: seen for name, seen in self._seen.items() if name in present}
        return found

    def _spare(self, pool: str, rows: Sequence[ReplicaRow]) -> set[str]:
        """Return the replacements of gone replicas, which Serve was told to stop."""
        starting = [row.replica_id for row in rows if row.state not in (RUNNING, STOPPING)]
        running = sum(row.state == RUNNING for row in rows)
        return set(starting[max(0, self._pools.wanted(pool) - running) :])

    def _state(self, row: ReplicaRow, member: MemberRecord | None) -> ReplicaState:
        if row.state == STOPPING or row.replica_id in self._leaving:
            return ReplicaState.LEAVING
        # A running replica that has removed its record is draining: its process was asked to stop.
        known = self._seen.get(row.replica_id)
        if member is None and known is not None and known.state is not ReplicaState.STARTING:
            return ReplicaState.LEAVING
        return ReplicaState.SERVING if row.state == RUNNING and member is not None else ReplicaState.STARTING

    def _look(
        self, name: str, pool: str, state: ReplicaState, now: float, member: MemberRecord | None
    ) -> Replica:
        known = self._seen.get(name)
        if known is None or known.state is not state:
            known = self._seen[name] = _Seen(pool, state, now)
        return Replica(name, pool, state, known.since_s, "" if member is None else member.worker_id)

    def _retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        now, members = self._clock.now(), self._pools.members()
        rows = {row.replica_id: row for row in self._pools.replicas(pool)}
        never_began, spare = 0, self._spare(pool, list(rows.values()))
        for name in dict.fromkeys(replica_ids):
            row, member, seen = rows.get(name), members.get(name), self._seen.get(name)
            if row is not None and (row.state == STOPPING or name in self._leaving or name in spare):
                continue
            if row is not None and row.state == RUNNING and member is not None:
                self._leaving[name] = _Leaving(pool, now)
                self._pools.ask_to_leave(member.worker_id, _REASON)
            elif row is not None or (seen is not None and seen.pool == pool):
                never_began += 1
        if never_began:
            self._pools.scale(pool, max(0, self._pools.wanted(pool) - never_began))

    def _follow(self, rows: Mapping[str, Sequence[ReplicaRow]]) -> None:
        # A pool that is no longer in the spec is deleted with all its replicas.
        self._leaving = {name: each for name, each in self._leaving.items() if each.pool in rows}
        for pool, own in rows.items():
            running = {row.replica_id for row in own if row.state == RUNNING}
            gone = [name for name, each in self._leaving.items() if each.pool == pool and name not in running]
            if gone:
                self._pools.scale(pool, max(0, self._pools.wanted(pool) - len(gone)))
            for name in gone:
                took_s = self._clock.now() - self._leaving.pop(name).since_s
                log.info("%s of %s has left after %.1f s", name, pool, took_s)

    def _asking(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except self._failures as error:
            raise UpstreamError(f"Ray does not answer: {error}", code="not_ready") from error
