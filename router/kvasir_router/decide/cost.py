"""The cost model: every consideration is a number of seconds, and the smallest sum wins.

Where the prompt is prefilled:
    queue     uncached tokens that were sent there before and are not prefilled yet
    prefill   its own uncached tokens: until its first token
    work      the same seconds once more, for whoever comes next. Without it, waiting for a neighbour's
              identical prefix and computing it a second time elsewhere would cost the same, and
              affinity would be lost exactly when many requests of one prefix come at once
    displace  what its blocks push out of a full cache, weighted with how full the cache is: spreads
              distinct prefixes over the fleet even when nobody is busy
    stall     in aggregated mode, the running streams that wait while this prompt is computed
Where it is decoded:
    transfer  the bytes that are missing there
    memory    KV beyond capacity has to wait for streams to end
    decode    its own tokens at the ITL of the batch that it joins, and the ITL that it adds to others

Prefill and decode side do not depend on each other, so the best pair is the best of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidate, Plan, RequestView
from kvasir_router.decide.eligible import Disaggregation, Eligible, eligible, missing_role

TIE_S = 1e-6


class PrefillTerms(NamedTuple):
    """Seconds that prefilling a request somewhere costs."""

    queue_s: float
    prefill_s: float
    work_s: float
    displace_s: float


class DecodeTerms(NamedTuple):
    """Seconds that decoding a request somewhere costs, its KV pulled from elsewhere."""

    transfer_s: float
    memory_s: float
    decode_s: float


class FullTerms(NamedTuple):
    """Seconds that running all of a request in one place costs."""

    queue_s: float
    prefill_s: float
    work_s: float
    displace_s: float
    stall_s: float
    memory_s: float
    decode_s: float


Terms = PrefillTerms | DecodeTerms | FullTerms


def prefill_terms(request: RequestView, candidate: Candidate) -> PrefillTerms:
    """The prefill part of `request` at `candidate`."""
    rates = candidate.rates
    own = rates.prefill_s(request.prompt_tokens - candidate.cached_tokens)
    fullness = min(1.0, candidate.held_tokens / candidate.kv_tokens)
    return PrefillTerms(rates.prefill_s(candidate.queued_prefill_tokens), own, own, own * fullness)


def decode_terms(request: RequestView, candidate: Candidate) -> DecodeTerms:
    """The decode part of `request` at `candidate`."""
    rates, streams = candidate.rates, candidate.streams
    missing = request.prompt_tokens - candidate.cached_tokens
    step = rates.step_s(streams + request.choices)
    added = step - rates.step_s(streams)
    need = request.prompt_tokens + request.output_tokens * request.choices
    excess = max(0, candidate.reserved_kv_tokens + need - candidate.kv_tokens)
    return DecodeTerms(
        rates.transfer_s(missing * candidate.kv_token_bytes),
        request.output_tokens * step * excess / candidate.kv_tokens,
        request.output_tokens * (step + streams * added),
    )


def full_terms(request: RequestView, candidate: Candidate) -> FullTerms:
    """The whole of `request` at `candidate`: nothing is moved, and running streams wait meanwhile."""
    prefill, decode = prefill_terms(request, candidate), decode_terms(request, candidate)
    stall = prefill.prefill_s * candidate.streams
    return FullTerms(*prefill, stall, decode.memory_s, decode.decode_s)


Scored = tuple[float, Candidate, Terms]


def _scored(
    candidates: Iterable[Candidate], terms: Callable[[RequestView, Candidate], Terms], request: RequestView
) -> list[Scored]:
    """Cheapest first."""
    scored: list[Scored] = []
    for candidate in candidates:
        parts = terms(request, candidate)
        scored.append((sum(parts), candidate, parts))
    scored.sort(key=itemgetter(0))
    return scored


def _named(*terms: Terms) -> tuple[tuple[str, float], ...]:
    return tuple(pair for part in terms for pair in part._asdict().items())


class CostPolicy:
    """Choose what costs the fewest seconds; among equals, the emptier of two drawn at random."""

    name = "cost"

    def __init__(self, disaggregation: Disaggregation, rng: Rng) -> None:
        self._disaggregation = disaggregation
        self._rng = rng

    def decide(self, request: RequestView, candidates: Sequence[Candidate], now: float) -> Plan | None:
        """See RoutingPolicy; the terms are in seconds."""
        may = eligible(candidates, self._disaggregation, request)
        apart = self._apart(request, may)
        whole = self._pick(_scored(may.full, full_terms, request))
        if whole is not None and (apart is None or whole[0] <= apart[0][0] + apart[1][0]):
            reason = _reason("aggregated", whole[1])
            return Plan(None, whole[1].target, reason, whole[1].cached_tokens, _named(whole[2]))
        if apart is None:
            return None
        prefill, decode = apart
        reason = _reason("disaggregated", prefill[1])
        terms = _named(prefill[2], decode[2])
        return Plan(prefill[1].target, decode[1].target, reason, prefill[1].cached_tokens, terms)

    def missing(self, candidates: Sequence[Candidate]) -> str | None:
        """See RoutingPolicy."""
        return missing_role(candidates, self._disaggregation)

    def _apart(self, request: RequestView, may: Eligible) -> tuple[Scored, Scored] | None:
        """The cheapest pair on two different workers."""
        prefills = _scored(may.prefill, prefill_terms, request)
        decodes = _scored(may.decode, decode_terms, request)
        best: tuple[Scored, Scored] | None = None
        for prefill in (self._pick(prefills), self._pick(_elsewhere(prefills))):
            if prefill is None:
                continue
            worker = prefill[1].target.worker_id
            decode = self._pick([d for d in decodes if d[1].target.worker_id != worker])
            if decode is None:
                continue
            if best is None or prefill[0] + decode[0] < best[0][0] + best[1][0]:
                best = prefill, decode
        return best

    def _pick(self, scored: list[Scored]) -> Scored | None:
        """The cheapest; ties by the power of two choices."""
        if not scored:
            return None
        ties = [entry for entry in scored if entry[0] - scored[0][0] <= TIE_S]
        if len(ties) == 1:
            return ties[0]
        first = self._rng.randrange(len(ties))
        second = (first + 1 + self._rng.randrange(len(ties) - 1)) % len(ties)
        return min(ties[first], ties[second], key=lambda entry: _occupied(entry[1]))


def _elsewhere(scored: list[Scored]) -> list[Scored]:
    """Without the cheapest one's worker: the runner-up matters where one worker may do either part."""
    return [s for s in scored if s[1].target.worker_id != scored[0][1].target.worker_id]


def _occupied(candidate: Candidate) -> tuple[int, int]:
    return candidate.held_tokens, candidate.reserved_kv_tokens


def _reason(mode: str, candidate: Candidate) -> str:
    return f"{mode}_{'prefix' if candidate.cached_tokens else 'load'}"
