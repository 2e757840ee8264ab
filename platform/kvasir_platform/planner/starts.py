"""Measured durations of starts, which set the horizon of a forecast."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from kvasir.ports.scaler import Replica, ReplicaState

_MOST_STARTS = 16


class Starts:
    """Durations of starts, by pool; a pool without any uses those of its model's other pool."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s
        self._took: dict[str, deque[float]] = {}
        self._open: dict[str, tuple[str, float]] = {}

    def look(self, replicas: Sequence[Replica], now: float) -> None:
        """Measure the replicas that have started to serve."""
        present = {each.replica_id: each for each in replicas}
        for name, (pool, since_s) in list(self._open.items()):
            each = present.get(name)
            if each is not None and each.state is ReplicaState.STARTING:
                continue
            del self._open[name]
            if each is not None and each.state is ReplicaState.SERVING:
                self._took.setdefault(pool, deque(maxlen=_MOST_STARTS)).append(now - since_s)
        for each in replicas:
            if each.state is ReplicaState.STARTING:
                self._open.setdefault(each.replica_id, (each.pool, min(now, each.since_s)))

    def typical_s(self, pool: str, others: Sequence[str]) -> float:
        """Return the median of the last durations."""
        for name in (pool, *others):
            if took := self._took.get(name):
                return statistics.median(took)
        return self._expected_s
