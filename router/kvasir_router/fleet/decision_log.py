"""Records why each request ran where it ran, for `kvasir explain`, and what its regret was.

Decisions of requests in flight are always kept, and of ended ones as many as the deployment spec says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvasir.ports.router import DecisionRecord, EndedRequests, RegretView, RequestSummary
from kvasir.ports.routing import Candidates, Plan, RequestView
from kvasir_router.fleet.decision_entry import About, Decided, DecisionEntry, record_of
from kvasir_router.fleet.judgement import JudgementBudget, RegretTotals, kept_regret

__all__ = ["About", "Decided", "DecisionLog"]


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
        self._ended: OrderedDict[str, DecisionEntry] = OrderedDict()
        self._about: tuple[tuple[str, str], ...] = ()
        self._totals = RegretTotals()
        self._budget = JudgementBudget()
        self.stopwatch = stopwatch
        self.latest = EndedRequests(capacity)
        """The summaries of the ended requests that are kept."""

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

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
        entry = DecisionEntry(request, candidates, plan, decided=decided, attempt=attempt, about=about)
        # It seldom changes, and the collector of garbage visits each object that is kept.
        if entry.about != self._about:
            self._about = entry.about
        entry.about = self._about
        self._live[request.request_id] = entry

    def ended(self, summary: RequestSummary) -> DecisionEntry | None:
        """Record the outcome. Return the decision; None for a request without one, which is ignored."""
        entry = self._live.pop(summary.request_id, None)
        if entry is None:
            return None
        entry.summary = summary
        if self._budget.take(summary.finished_s) and (found := kept_regret(entry)) is not None:
            self._totals.add(found)
        self._ended.pop(summary.request_id, None)
        self._ended[summary.request_id] = entry
        if len(self._ended) > self._capacity:
            self._ended.popitem(last=False)
        self.latest.add(summary)
        return entry

    def regret(self) -> RegretView:
        """Return the regret of the decisions that were judged as their requests ended."""
        return self._totals.view()

    def explain(self, request_id: str) -> DecisionRecord | None:
        """Return the record of a request in flight or recently ended; None for another."""
        entry = self._live.get(request_id) or self._ended.get(request_id)
        if entry is None:
            return None
        kept_regret(entry)
        return record_of(request_id, self._policy, entry)
