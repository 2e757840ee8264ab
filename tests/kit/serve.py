"""A minimal Ray Serve controller, for faults and orders of events that the real one cannot produce on demand:
it starts requested replicas, replaces those that exited, and of surplus replicas stops starting ones first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.core.errors import ConfigError
from kvasir.core.membership import MemberRecord
from kvasir_platform.cluster.ray.pool_status import ReplicaRow


class AwayError(Exception):
    """Stands for an exception of Ray."""


@dataclass
class ServedPool:
    """`rows` are the states of its replicas by name, `ended` the replicas that Serve has stopped. At most
    `most` replicas are allowed."""

    prefix: str
    target: int = 0
    rows: dict[str, str] = field(default_factory=dict)
    made: int = 0
    ended: list[str] = field(default_factory=list)
    most: int = 100


class Serve:
    """See cluster.ray.scaler.ScalablePools. `reconcile` is one iteration of its controller, `come_up`
    completes all starts; `retired` are the replicas that were retired, with reasons."""

    def __init__(self, **targets: int) -> None:
        self.pools = {pool: ServedPool(pool[0], target) for pool, target in targets.items()}
        self.retired: dict[str, str] = {}
        self.away = False
        self.reconcile()
        self.come_up()

    def names(self) -> Sequence[str]:
        return list(self.pools)

    def wanted(self, pool: str) -> int:
        return self._pool(pool).target

    def replicas(self, pool: str) -> list[ReplicaRow]:
        if self.away:
            raise AwayError("gone fishing")
        return [ReplicaRow(name, state) for name, state in self._pool(pool).rows.items()]

    def members(self) -> Mapping[str, MemberRecord]:
        return {
            name: MemberRecord(f"w-{name}", "h:1", pool, 1, 1, name)
            for pool, each in self.pools.items()
            for name, state in each.rows.items()
            if state == "RUNNING" and name not in self.retired
        }

    def ask_to_leave(self, worker_id: str, reason: str) -> None:
        self.retired[worker_id.removeprefix("w-")] = reason

    def scale(self, pool: str, replicas: int) -> None:
        found = self._pool(pool)
        if replicas > max(found.most, found.target):
            raise ConfigError(f"{pool} can have {found.most} replicas at most (scaling.max)")
        found.target = replicas

    def reconcile(self) -> None:
        for pool in self.pools.values():
            while len(pool.rows) < pool.target:
                pool.made += 1
                pool.rows[f"{pool.prefix}{pool.made}"] = "STARTING"
            while len(pool.rows) > pool.target:
                starting = [name for name, state in pool.rows.items() if state == "STARTING"]
                name = starting[-1] if starting else next(iter(pool.rows))
                del pool.rows[name]
                pool.ended.append(name)

    def come_up(self) -> None:
        for pool in self.pools.values():
            pool.rows = dict.fromkeys(pool.rows, "RUNNING")

    def drained(self, name: str) -> None:
        """The process has exited, and Serve has not replaced it yet."""
        for pool in self.pools.values():
            pool.rows.pop(name, None)

    def _pool(self, pool: str) -> ServedPool:
        if pool not in self.pools:
            raise ConfigError(f"there is no pool {pool!r}")
        return self.pools[pool]
