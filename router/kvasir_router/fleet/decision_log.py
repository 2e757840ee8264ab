"""Records why each request ran where it ran, for `kvasir explain`, and what its regret was.

Decisions of requests in flight are always kept, and of ended ones as many as the deployment spec says.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.ports.router import DecisionRecord, EndedRequests, RegretView, RequestSummary
from kvasir.ports.routing import Candidates, Plan, RequestView, RoutingTarget
from kvasir_router.decide.packing import Decided, TableHead
from kvasir_router.fleet.decision_entry import (
    About,
    DecisionEntry,
    entry_of,
    packable,
    packed_places,
    record_of,
    unpacked,
)
from kvasir_router.fleet.judgement import JudgementBudget, RegretTotals, kept_regret

__all__ = ["DecisionLog"]

_TOGETHER = 64
"""Ended requests that are worked on at once. Between two of them, code and data of this module leave the
processor's caches, so that each of them alone takes longer."""


class DecisionLog:
    """Holds the requests in flight and up to `capacity` ended ones; 0 keeps nothing at all.

    `policy` is the name of the deciding policy. `stopwatch` returns seconds, to time a decision;
    `on_decision` receives each duration, even if nothing is kept.
    """

    def __init__(
        self,
        capacity: int,
        *,
        policy: str,
        stopwatch: Callable[[], float],
        on_decision: Callable[[float], None],
    ) -> None:
        self._capacity = capacity
        self._policy = policy
        self._on_decision = on_decision
        self._live: dict[str, DecisionEntry] = {}
        self._unsorted: list[tuple[DecisionEntry, RequestSummary]] = []
        self._totals = RegretTotals()
        self._budget = JudgementBudget()
        self.stopwatch = stopwatch
        # With each of them, its decision, which shares its packed places.
        self._latest = EndedRequests(capacity)
        self._targets: tuple[RoutingTarget, ...] = ()
        self._about: tuple[tuple[str, str], ...] = ()
        self._heads: tuple[TableHead, ...] = ()
        self._places = b""

    def __len__(self) -> int:
        self._sort()
        return len(self._live) + len(self._latest)

    def decided(
        self,
        request: RequestView,
        candidates: Candidates,
        plan: Plan,
        decided: Decided,
        about: About,
    ) -> None:
        """Record `plan` for a request; an earlier decision for it is only counted. `candidates` are not
        kept."""
        self._on_decision(decided.took_s)
        if not self._capacity:
            return
        before = self._live.get(request.request_id)
        attempt = 1 if before is None else before.attempt + 1
        self._live[request.request_id] = entry_of(
            request, candidates, plan, decided=decided, attempt=attempt, about=about
        )

    def ended(self, summary: RequestSummary) -> DecisionEntry | None:
        """Record the outcome. Return the decision; None for a request without one, which is ignored."""
        entry = self._live.pop(summary.request_id, None)
        if entry is None:
            return None
        entry.summary = summary
        self._unsorted.append((entry, summary))
        if len(self._unsorted) >= _TOGETHER:
            self._sort()
        return entry

    @property
    def latest(self) -> EndedRequests:
        """The summaries of the ended requests that are kept."""
        self._sort()
        return self._latest

    def regret(self) -> RegretView:
        """Return the regret of the decisions that were judged as their requests ended."""
        self._sort()
        return self._totals.view()

    def explain(self, request_id: str) -> DecisionRecord | None:
        """Return the record of a request in flight or recently ended; None for another."""
        self._sort()
        entry = self._live.get(request_id) or self._ended(request_id)
        if entry is None:
            return None
        kept_regret(entry)
        return record_of(request_id, self._policy, entry)

    def _ended(self, request_id: str) -> DecisionEntry | None:
        latest = self._latest
        row = latest.find(request_id)
        return None if row is None else unpacked(*latest.beside(row), latest[row])

    def _sort(self) -> None:
        """Judge the decisions that have ended since the last call, and keep the newest."""
        unsorted, self._unsorted = self._unsorted, []
        for entry, summary in unsorted:
            if self._budget.take(summary.finished_s) and (found := kept_regret(entry)) is not None:
                self._totals.add(found)
        self._latest.add(
            [summary for _, summary in unsorted],
            [packable(entry) for entry, _ in unsorted],
            [self._packed_places(entry) for entry, _ in unsorted],
        )

    def _packed_places(self, entry: DecisionEntry) -> bytes:
        """Return the places of a decision; of decisions among the same places, the same bytes."""
        same = entry.targets is self._targets and entry.about is self._about
        if not same or entry.heads != self._heads:
            self._targets, self._about, self._heads = entry.targets, entry.about, entry.heads
            self._places = packed_places(entry)
        return self._places
