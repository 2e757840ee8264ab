"""Policies that look at no prefix: a baseline to compare with, and for workloads without reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidate, Plan, RequestView
from kvasir_router.decide.eligible import Disaggregation, eligible, missing_role

Choose = Callable[[Sequence[Candidate]], Candidate]


def _plan(
    request: RequestView,
    candidates: Sequence[Candidate],
    disaggregation: Disaggregation,
    choose: tuple[Choose, Choose],
    reason: str,
) -> Plan | None:
    """Apart where that is possible and allowed, else whole, each part chosen on its own."""
    may = eligible(candidates, disaggregation, request)
    decoders = [d for d in may.decode if _others(may.prefill, d)]
    if decoders:
        decode = choose[1](decoders)
        prefill = choose[0](_others(may.prefill, decode))
        return Plan(prefill.target, decode.target, reason, prefill.cached_tokens)
    if may.full:
        whole = choose[1](may.full)
        return Plan(None, whole.target, reason, whole.cached_tokens)
    return None


def _others(candidates: Sequence[Candidate], than: Candidate) -> list[Candidate]:
    return [c for c in candidates if c.target.worker_id != than.target.worker_id]


class RoundRobin:
    """Each part of the fleet in turn."""

    name = "round_robin"

    def __init__(self, disaggregation: Disaggregation, rng: Rng) -> None:
        self._disaggregation = disaggregation
        self._start = rng.getrandbits(16)
        self._turn = 0

    def decide(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Plan | None:
        """See RoutingPolicy."""
        position = self._start + self._turn

        def choose(among: Sequence[Candidate]) -> Candidate:
            return sorted(among, key=lambda c: c.target)[position % len(among)]

        plan = _plan(request, candidates, self._disaggregation, (choose, choose), self.name)
        self._turn += plan is not None
        return plan

    def missing(self, candidates: Sequence[Candidate]) -> str | None:
        """See RoutingPolicy."""
        return missing_role(candidates, self._disaggregation)


class LeastLoaded:
    """The fewest queued prompt tokens to prefill, the fewest running streams to decode."""

    name = "least_loaded"

    def __init__(self, disaggregation: Disaggregation, rng: Rng) -> None:
        self._disaggregation = disaggregation
        self._rng = rng

    def decide(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Plan | None:
        """See RoutingPolicy."""
        choose = (
            self._fewest(lambda c: (c.queued_prefill_tokens, c.streams)),
            self._fewest(lambda c: (c.streams, c.queued_prefill_tokens)),
        )
        return _plan(request, candidates, self._disaggregation, choose, self.name)

    def missing(self, candidates: Sequence[Candidate]) -> str | None:
        """See RoutingPolicy."""
        return missing_role(candidates, self._disaggregation)

    def _fewest(self, load: Callable[[Candidate], tuple[int, int]]) -> Choose:
        def choose(among: Sequence[Candidate]) -> Candidate:
            least = min(load(c) for c in among)
            ties = [c for c in among if load(c) == least]
            return ties[self._rng.randrange(len(ties))]

        return choose
