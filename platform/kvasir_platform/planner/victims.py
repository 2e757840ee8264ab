"""Which replicas go, and which change their part of the work. Pure.

A replica that has not begun to serve loses nothing: first those go that take too long for it, then the
youngest. Of those that serve, the one goes whose cache has saved
the fewest prompt tokens lately: what it holds is asked for the least. Between equals it is the one with the
fewest streams, which is gone the soonest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.core.demand import WorkerStats
from kvasir.ports.scaler import Replica, ReplicaState

_SAVED_S = 900.0
"""Over so much time it is averaged what caches save."""


@dataclass(slots=True)
class Savings:
    """What each worker's cache has saved lately, in prompt tokens a second."""

    _rates: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def take(self, workers: Iterable[WorkerStats], seconds: float) -> None:
        """The newest counts, so long after the last."""
        fade = math.exp(-seconds / _SAVED_S)
        counts = {each.worker_id: each.hit_tokens for each in workers}
        rates: dict[str, float] = {}
        for name, count in counts.items():
            saved = max(0, count - self._counts.get(name, count)) / seconds if seconds > 0.0 else 0.0
            rates[name] = fade * self._rates.get(name, 0.0) + (1.0 - fade) * saved
        self._rates, self._counts = rates, counts

    def of(self, worker_id: str) -> float:
        """Of one worker; 0 for one that is not known."""
        return self._rates.get(worker_id, 0.0)


def victims(
    replicas: Sequence[Replica],
    count: int,
    savings: Savings,
    workers: Mapping[str, WorkerStats],
    late_s: float = -math.inf,
) -> list[Replica]:
    """Those of the replicas of one pool that go, so many at most. Whose start began before `late_s` takes too
    long for it."""

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
    """Of one pool: what serves or will, and what should be."""

    pool: str
    serving: int
    have: int
    desired: int
    need: int


def flips(sizes: Sequence[Size], partners: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """(from, to, how many) serving replicas that do the partner pool's work from now on: where one pool is to
    grow and its partner has more than it needs, a start and an end are saved."""
    by_name = {each.pool: each for each in sizes}
    found = []
    for each in sizes:
        other = by_name.get(partners.get(each.pool, ""))
        short = each.desired - each.have
        if other is None or short <= 0:
            continue
        # One that has not begun to serve is no reason to give up one that does.
        over = other.serving - max(1, other.need, other.desired if other.desired > other.have else 0)
        if over > 0:
            found.append((other.pool, each.pool, min(short, over)))
    return found
