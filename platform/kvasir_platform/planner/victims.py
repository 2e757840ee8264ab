"""Selects the replicas to remove, and those that change roles. Pure.

A replica that does not serve yet loses nothing: those whose start takes too long are removed first, then the
youngest. Of the serving ones, the replica is removed whose cache has recently saved the fewest prompt tokens.
Ties go to the one with the fewest streams, which drains soonest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.core.demand import WorkerStats
from kvasir.ports.scaler import Replica, ReplicaState

_SAVED_S = 900.0
"""Seconds over which a cache's savings are averaged."""


@dataclass(slots=True)
class Savings:
    """Prompt tokens per second that each worker's cache has recently saved."""

    _rates: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def take(self, workers: Iterable[WorkerStats], seconds: float) -> None:
        """Take the latest counts, `seconds` after the last."""
        fade = math.exp(-seconds / _SAVED_S)
        counts = {each.worker_id: each.hit_tokens for each in workers}
        rates: dict[str, float] = {}
        for name, count in counts.items():
            saved = max(0, count - self._counts.get(name, count)) / seconds if seconds > 0.0 else 0.0
            rates[name] = fade * self._rates.get(name, 0.0) + (1.0 - fade) * saved
        self._rates, self._counts = rates, counts

    def of(self, worker_id: str) -> float:
        """Return the savings of one worker; 0 for an unknown one."""
        return self._rates.get(worker_id, 0.0)


def victims(
    replicas: Sequence[Replica],
    count: int,
    savings: Savings,
    workers: Mapping[str, WorkerStats],
    late_s: float = -math.inf,
) -> list[Replica]:
    """Return at most `count` replicas of one pool to remove. A start that began before `late_s` takes too
    long."""

    def worth(each: Replica) -> tuple[bool, bool, float, int, float]:
        figures = workers.get(each.worker_id)
        streams = 0 if figures is None else figures.streams
        serves = each.state is ReplicaState.SERVING
        late = not serves and each.since_s < late_s
        return serves, not late, savings.of(each.worker_id), streams, -each.since_s

    going = [each for each in replicas if each.state is not ReplicaState.LEAVING]
    return sorted(going, key=worth)[:count]


@dataclass(frozen=True, slots=True)
class Size:
    """One pool: its replicas that serve or will, and its desired size."""

    pool: str
    serving: int
    have: int
    desired: int
    need: int


def flips(sizes: Sequence[Size], partners: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """Return (from, to, count) of serving replicas that take over the partner pool's work: if one pool grows
    and its partner has a surplus, this saves a start and a stop."""
    by_name = {each.pool: each for each in sizes}
    found = []
    for each in sizes:
        other = by_name.get(partners.get(each.pool, ""))
        short = each.desired - each.have
        if other is None or short <= 0:
            continue
        # A replica that does not serve yet does not justify giving up one that does.
        over = other.serving - max(1, other.need, other.desired if other.desired > other.have else 0)
        if over > 0:
            found.append((other.pool, each.pool, min(short, over)))
    return found
