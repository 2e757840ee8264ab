"""What a router has to write of its requests and workers: sums by group, and the hours of each worker.

A request is added once, when it ends, without I/O. Many are divided among groups at once, which takes a few
microseconds for each. Everything is bounded: groups beyond MOST_GROUPS of an hour lose their key and SLO
class, and hours that are over are dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.core.demand import WorkerStats
from kvasir.core.identity import WorkerIdentity
from kvasir.ports.router import RequestSummary, WorkerView
from kvasir.ports.stores.costs import HOUR_S, CostBatch, CostGroup, WorkerHour, WorkSums
from kvasir_platform.gateway.costs.busy import BusyTime, joined_spans
from kvasir_platform.gateway.costs.claims import (
    OF_KIND,
    Claim,
    Claims,
    Facts,
    RequestKind,
    claims_of,
    facts_of,
    lost_claims,
    lost_some,
    paired_claims,
    reached,
)
from kvasir_platform.gateway.costs.prices import Prices

MOST_GROUPS = 5000
"""Groups of one hour that keep all their labels."""
MOST_WORKERS = 5000
"""Workers whose figures are kept, those that have left included."""
OTHER = "(other)"
KEPT_HOURS = 3
"""Hours to which a request that ends is divided. What it did before them counts for the first."""
_REFRESH_S = 1.0
_TOGETHER = 256
"""Requests that are divided at once, for which streams wait."""
_PHASES = ("prefill", "decode", "kv", "transfer", "wasted")


class CostSource(Protocol):
    """What a router says of its workers."""

    def workers(self) -> Sequence[WorkerView]: ...

    def worker_figures(self) -> Sequence[WorkerStats]: ...


@dataclass(slots=True)
class _WorkerTime:
    """A worker in one hour: when it was seen, in Unix seconds, and when requests ran there."""

    busy: BusyTime
    identity: WorkerIdentity | None = None
    first_s: float | None = None
    last_s: float = 0.0
    changed: bool = True


_Place = tuple[int, str, str]
"""An hour, a pool and a worker."""
_GroupFields = tuple[int, str, str, str, str, str]
"""Those of a CostGroup, which takes longer to make."""
_Labels = tuple[str, str, str, str]
"""Those of RequestKind."""


class CostLedger:
    """The accounts of one process. `name` is unique among routers; `now` reads the routers' clock, and `wall`
    Unix time. Set `source` before requests end. Call everything on one event loop."""

    def __init__(
        self, name: str, prices: Prices, now: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.name = name
        self.source: CostSource | None = None
        self.claimed: defaultdict[tuple[str, str], float] = defaultdict(float)
        """Seconds claimed in all batches, by tenant and phase."""
        self.unpriced: set[str] = set()
        """Pools with GPUs of which no price is known."""
        self._prices = prices
        self._now = now
        self._wall = wall
        self._ahead_s = wall() - now()
        self._work: dict[_GroupFields, list[float]] = {}
        self._groups: set[CostGroup] = set()
        self._groups_hour = 0
        self._places: dict[_Place, _WorkerTime] = {}
        self._stats: dict[str, WorkerStats] = {}
        self._present: frozenset[tuple[str, str]] = frozenset()
        self._sampled_s: float | None = None
        self._refreshed_s = float("-inf")
        self._number = 0
        self._undivided: list[RequestSummary] = []

    # -- requests --------------------------------------------------------------------------------

    def ended(self, summary: RequestSummary) -> None:
        """Add a request that has ended."""
        stats, prefiller, decoder = self._stats, summary.prefill_worker, summary.decode_worker
        if (decoder is not None and decoder not in stats) or (
            prefiller is not None and prefiller not in stats
        ):
            self._refresh()
        self._undivided.append(summary)
        if len(self._undivided) >= _TOGETHER:
            self._divide()

    def claims_of(self, summary: RequestSummary) -> dict[tuple[str, str], WorkSums]:
        """Return what a request that has ended claims, by worker and pool, at the rates known at the call. It
        is not added."""
        self._refresh()
        found: dict[tuple[str, str], WorkSums] = {}
        for claim in claims_of(summary, self._stats):
            place = claim.worker_id, self._pool_of(claim.worker_id)
            found[place] = found.get(place, WorkSums()).plus(claim.sums)
        return found

    def _divide(self) -> None:
        """Add the claims of the requests that ended since the last call."""
        undivided, self._undivided = self._undivided, []
        found: list[RequestSummary] = []
        facts: list[Facts] = []
        for summary, each in zip(undivided, facts_of(undivided), strict=True):
            if lost_some(each):
                for claim in lost_claims(summary, self._stats):
                    self._add(claim, RequestKind(*each[:OF_KIND]).labels)
            if reached(each):
                found.append(summary)
                facts.append(each)
        if not found:
            return
        numbers: dict[tuple[Any, ...], int] = {}
        places = [numbers.setdefault(each[:OF_KIND], len(numbers)) for each in facts]
        kind = np.fromiter(places, np.intp, len(places))
        kinds = [RequestKind(*fields) for fields in numbers]
        apart, first, last = paired_claims(found, facts, kinds, kind, self._stats)
        hour = int((last.end_s.max() + self._ahead_s) // HOUR_S) * HOUR_S
        within = first.begin_s + self._ahead_s >= hour
        sides = (
            (first, [each.prefiller or "" for each in kinds], apart),
            (last, [each.last for each in kinds], np.ones(len(found), bool)),
        )
        for claims, workers, rows in sides:
            self._add_all(claims, kind, rows & within, list(zip(workers, kinds, strict=True)), hour)
            for row in np.flatnonzero(rows & ~within).tolist():
                at = kind.item(row)
                self._add(claims.claim(row, workers[at]), kinds[at].labels)

    def _add_all(
        self,
        claims: Claims,
        kind: NDArray[np.intp],
        rows: NDArray[np.bool_],
        kinds: Sequence[tuple[str, RequestKind]],
        hour: int,
    ) -> None:
        """Add those rows of the claims, all within one hour. `kinds` has the worker and the kind of each."""
        of = kind[rows]
        counts = np.bincount(of, minlength=len(kinds)).tolist()
        sums = np.array([np.bincount(of, column[rows], len(kinds)) for column in claims.sums]).T.tolist()
        busy: list[BusyTime | None] = [None] * len(kinds)
        for at, (worker_id, each) in enumerate(kinds):
            if counts[at]:
                pool = self._pool_of(worker_id)
                busy[at] = self._place((hour, pool, worker_id))
                self._claim((hour, pool, *each.labels), sums[at])
        begins, ends = (claims.begin_s[rows] + self._ahead_s), (claims.end_s[rows] + self._ahead_s)
        for at, begin_s, end_s in joined_spans(of, begins, ends):
            if (time := busy[at]) is not None:
                time.add(begin_s, end_s)

    def _pool_of(self, worker_id: str) -> str:
        stats = self._stats.get(worker_id)
        return OTHER if stats is None else stats.pool

    def _add(self, claim: Claim, labels: _Labels) -> None:
        worker_id, begin_s, end_s, sums = claim
        begin_s, end_s = begin_s + self._ahead_s, end_s + self._ahead_s
        pool = self._pool_of(worker_id)
        last = int(end_s // HOUR_S) * HOUR_S
        for hour, part in _by_hour(begin_s, end_s):
            self._place((hour, pool, worker_id)).add(begin_s, end_s)
            self._claim((hour, pool, *labels), _part(sums, part, counts=hour == last))

    def _claim(self, fields: _GroupFields, sums: Sequence[float]) -> None:
        known = self._work.get(fields)
        if known is None:
            known = self._work.setdefault(self._bounded(CostGroup(*fields)), [0.0] * len(sums))
        for at, amount in enumerate(sums):
            if amount:
                known[at] += amount

    def _bounded(self, group: CostGroup) -> CostGroup:
        """Return the group, without key and SLO class if there are too many groups in the hour."""
        if group in self._groups:
            return group
        if group.hour > self._groups_hour:
            self._groups_hour = group.hour
            self._groups = {each for each in self._groups if each.hour > group.hour - KEPT_HOURS * HOUR_S}
        if len(self._groups) >= MOST_GROUPS:
            group = group._replace(key=OTHER, slo=OTHER)
        self._groups.add(group)
        return group

    # -- workers ---------------------------------------------------------------------------------

    def sample(self) -> None:
        """Note which workers there are. A worker that came or left since the last call is counted for half of
        the time between."""
        if self.source is None:
            return
        self._divide()
        self._ahead_s = self._wall() - self._now()
        now = self._wall()
        since = now if self._sampled_s is None else self._sampled_s
        middle = (since + now) / 2
        views = {(view.pool, view.worker_id): view.identity for view in self.source.workers()[:MOST_WORKERS]}
        for name in views.keys() | self._present:
            begin_s = since if name in self._present else middle
            end_s = now if name in views else middle
            self._saw(name, begin_s, end_s, views.get(name))
        self._present = frozenset(views)
        self._sampled_s = now
        self._refresh()
        old = int(now // HOUR_S - KEPT_HOURS) * HOUR_S
        self._places = {place: each for place, each in self._places.items() if place[0] > old or each.changed}

    def _saw(
        self, name: tuple[str, str], begin_s: float, end_s: float, identity: WorkerIdentity | None
    ) -> None:
        pool, worker_id = name
        for hour, _ in _by_hour(begin_s, end_s):
            place = self._worker_time((hour, pool, worker_id))
            place.identity = identity or place.identity
            place.first_s = max(begin_s, hour) if place.first_s is None else place.first_s
            place.last_s = min(end_s, hour + HOUR_S)
            place.changed = True

    def _refresh(self) -> None:
        """Read the rates of all workers. Those of a worker that has left are kept for what ran there."""
        now = self._now()
        if self.source is None or now - self._refreshed_s < _REFRESH_S:
            return
        self._refreshed_s = now
        figures = {each.worker_id: each for each in self.source.worker_figures()}
        if len(self._stats) + len(figures) > MOST_WORKERS:
            self._stats.clear()
        self._stats.update(figures)

    def _place(self, place: _Place) -> BusyTime:
        found = self._places.get(place) or self._worker_time(place)
        found.changed = True
        return found.busy

    def _worker_time(self, place: _Place) -> _WorkerTime:
        found = self._places.get(place)
        if found is None:
            found = self._places[place] = _WorkerTime(BusyTime(place[0], place[0] + HOUR_S))
        return found

    # -- writing ---------------------------------------------------------------------------------

    def take(self) -> CostBatch | None:
        """Return what is new since the last call, None if nothing is. It is not returned again."""
        self._divide()
        workers = []
        for place, each in self._places.items():
            if each.changed and each.first_s is not None:
                each.changed = False
                workers.append(self._worker_hour(place, each))
        if not workers and not self._work:
            return None
        work = {CostGroup(*fields): WorkSums(*sums) for fields, sums in self._work.items()}
        self._work = {}
        for group, each_sums in work.items():
            for phase, seconds in zip(_PHASES, each_sums[4:], strict=True):
                if seconds:
                    self.claimed[group.tenant, phase] += seconds
        self._number += 1
        return CostBatch(self.name, self._number, work, workers)

    def _worker_hour(self, place: _Place, each: _WorkerTime) -> WorkerHour:
        hour, pool, worker_id = place
        price = self._prices.of(pool, each.identity)
        if not price.known:
            self.unpriced.add(pool)
        return WorkerHour(
            hour,
            pool,
            worker_id,
            self.name,
            round((each.first_s or hour) - hour, 3),
            round(each.last_s - hour, 3),
            round(each.busy.seconds, 3),
            price.gpus,
            price.per_hour,
        )


def _by_hour(begin_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    """Return each hour of a span of Unix time, the last ones of a long span, and the part of it in each."""
    last = int(end_s // HOUR_S) * HOUR_S
    first = max(int(begin_s // HOUR_S) * HOUR_S, last - (KEPT_HOURS - 1) * HOUR_S)
    for hour in range(first, last + 1, HOUR_S):
        low_s = begin_s if hour == first else hour
        yield hour, (min(end_s, hour + HOUR_S) - low_s) / (end_s - begin_s) if end_s > begin_s else 1.0


def _part(sums: WorkSums, part: float, *, counts: bool) -> WorkSums:
    """Return a part of the claims, and all tokens and requests or none."""
    whole = sums[:4] if counts else (0.0, 0.0, 0.0, 0.0)
    return WorkSums(*whole, *(seconds * part for seconds in sums[4:]))
