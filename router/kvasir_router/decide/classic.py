"""Policies that ignore prefixes: baselines, and choices for workloads without reuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, IntColumn, Plan, RequestView
from kvasir_router.decide.eligible import Choose, Disaggregation, missing_role, plan_by_parts


class RoundRobin:
    """Round robin over each part of the fleet, in the order of target names."""

    name = "round_robin"

    def __init__(self, disaggregation: Disaggregation, rng: Rng) -> None:
        self._disaggregation = disaggregation
        self._start = rng.getrandbits(16)
        self._turn = 0

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        """See RoutingPolicy."""
        position = self._start + self._turn

        def choose(rows: IntColumn) -> int:
            order: list[int] = sorted(rows.tolist(), key=candidates.targets.__getitem__)
            return order[position % len(order)]

        plan = plan_by_parts(
            candidates,
            self._disaggregation,
            request.whole,
            prefill=choose,
            decode=choose,
            full=choose,
            reason=self.name,
        )
        self._turn += plan is not None
        return plan

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        """See RoutingPolicy."""
        return missing_role(prefills, decodes, worker, self._disaggregation)


class LeastLoaded:
    """Fewest queued prompt tokens for prefill, fewest running streams for decode; ties at random."""

    name = "least_loaded"

    def __init__(self, disaggregation: Disaggregation, rng: Rng) -> None:
        self._disaggregation = disaggregation
        self._rng = rng

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        """See RoutingPolicy."""
        queued, streams = candidates.queued_prefill_tokens, candidates.streams
        by_streams = self._least(streams, queued)
        return plan_by_parts(
            candidates,
            self._disaggregation,
            request.whole,
            prefill=self._least(queued, streams),
            decode=by_streams,
            full=by_streams,
            reason=self.name,
        )

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        """See RoutingPolicy."""
        return missing_role(prefills, decodes, worker, self._disaggregation)

    def _least(self, first: IntColumn, then: IntColumn) -> Choose:
        def choose(rows: IntColumn) -> int:
            rows = _smallest(_smallest(rows, first), then)
            return int(rows[self._rng.randrange(len(rows))])

        return choose


def _smallest(rows: IntColumn, column: IntColumn) -> IntColumn:
    values = column[rows]
    least: IntColumn = rows[values == np.minimum.reduce(values)]
    return least
