"""Ray Serve's controller in a few lines, for faults and turns that the real one cannot be asked for: it
starts what is asked for, replaces what has ended, and of too many ends first what has not begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.core.errors import ConfigError
from kvasir.core.membership import MemberRecord
from kvasir_platform.cluster.ray.rolling import ReplicaRow


class AwayError(Exception):
    """What Ray would raise."""


@dataclass
class ServedPool:
    """`rows` are the states of its replicas by their names, `ended` those that Serve has stopped. It may have
    `most`."""

    prefix: str
    target: int = 0
    rows: dict[str, str] = field(default_factory=dict)
    made: int = 0
    ended: list[str] = field(default_factory=list)
    most: int = 100


class Serve:
    """See cluster.ray.scaler.ScalablePools. `reconcile` is a turn of its controller, `come_up` ends all
    starts; `retired` are those that were asked to leave, and why."""

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
        """The process has ended, and Serve has not put another in its place yet."""
        for pool in self.pools.values():
            pool.rows.pop(name, None)

    def _pool(self, pool: str) -> ServedPool:
        if pool not in self.pools:
            raise ConfigError(f"there is no pool {pool!r}")
        return self.pools[pool]
