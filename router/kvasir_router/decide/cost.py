"""The cost model: every term is a number of seconds, and the smallest sum wins.

Until the first token, what the client waits for:
    queue     prompts sent there before that are not computed yet, in steps shared with decoding streams
    memory    KV beyond capacity waits for streams to end; only the part that the queue does not hide
    load      the prefix that is loaded from CPU memory, disk or a remote store, where that is faster
    prefill   the rest of the prompt
    transfer  the bytes that the decode place lacks, over its link to the prefill place, and the step that
              their transfer begins with
The weight of a second of that wait grows with the part of the promised TTFT that it uses up (`slo`): low
while there is slack, so that slack is spent on cache hits and on streams, and four times that once the
promise is broken.

What it costs other requests:
    work      its prefill once more, for the next requests. Without it, waiting for a neighbour's identical
              prefix and computing it on another worker would cost the same, and affinity would be lost
              exactly when many requests of one prefix arrive at once
    displace  what its blocks evict from a cache, weighted with how full the cache is: spreads distinct
              prefixes over an idle fleet, and puts copies of a hot one where they evict least
    link      its transfer once more, for requests whose KV waits behind it
    stall     the streams that wait while this prompt is computed beside them, each for all of that time
    decode    its own tokens at the ITL of the batch that it joins, and the ITL that it adds to others
The weight of a second that a stream loses grows as the stream nears its promised ITL.

A hot prefix gets a second copy when the wait for its holder costs more than computing it on another worker.
Disaggregation is right when the transfer costs less than the stall and the queue that it avoids. Places that
differ by less than a part of what this request adds to them count as equal, and several routers must not all
choose the same one: the cheaper of two sampled at random is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvasir.native import cost_pairs, cost_terms
from kvasir.ports.clock import Rng
from kvasir.ports.routing import (
    Candidates,
    FloatColumn,
    IntColumn,
    Plan,
    RequestView,
    TermTable,
)
from kvasir_router.decide.eligible import Disaggregation, Eligible, apart_or_whole, missing_role
from kvasir_router.decide.rates import CHUNK_TOKENS
from kvasir_router.decide.transfers import Transfers

TERMS: tuple[str, ...] = (
    "transfer_s",
    "step_s",
    "link_s",
    "slo_s",
    "memory_s",
    "decode_s",
    "queue_s",
    "load_s",
    "prefill_s",
    "slo_s",
    "work_s",
    "displace_s",
    "stall_s",
)
# The terms of each part are adjacent, so that one slice returns them.
_DECODE, _WHOLE, _PREFILL = slice(0, 6), slice(4, 13), slice(6, 13)
DECODE_TERMS, WHOLE_TERMS, PREFILL_TERMS = TERMS[_DECODE], TERMS[_WHOLE], TERMS[_PREFILL]
_SLO = 3
"""The column of `slo_s` in either part of a disaggregated request."""
_TRANSFER, _LINK, _PREFILL_S = (TERMS.index(name) for name in ("transfer_s", "link_s", "prefill_s"))
_MISSING = len(TERMS)
"""The row after the terms: prompt tokens that are neither cached nor fetched."""
_SHORTEST_S = 1e-9
"""Avoids division by zero for a promised time of zero; too short to be measured."""


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Weights that the model cannot measure.

    within: weight of a second of waiting when none of the promised time is used up; it grows by 1 until
        the promised time has passed.
    steepest: multiple of the promised time after which the weight stops growing: a request that is
        hopelessly late must not hide its effect on others.
    streams: additional weight of a second that streams lose, which each may lose many times.
    work: seconds of later requests, per second of prefill.
    reuse: probability that a block evicted from a full cache would have been used again.
    tie: places whose costs differ by less than this part of the request's own engine time are equal.
    chunk_tokens: prompt tokens that engines compute in one step beside their streams.
    pairs: most pairs of places that are compared; in larger fleets, pairs of the best of each side.
    """

    within: float = 0.3
    steepest: float = 1.0
    streams: float = 1.5
    work: float = 1.5
    reuse: float = 0.5
    tie: float = 0.2
    chunk_tokens: int = CHUNK_TOKENS
    pairs: int = 4096


DEFAULT_WEIGHTS = CostWeights()


class _Choice(NamedTuple):
    """The best way to run a request in one mode: rows of the candidates."""

    prefill: int | None
    decode: int
    cost: float
    ttft_s: float
    tables: tuple[TermTable, ...]


class CostPolicy:
    """Chooses the lowest cost in seconds; among near equals, the cheaper of two sampled at random."""

    name = "cost"

    def __init__(
        self, disaggregation: Disaggregation, rng: Rng, weights: CostWeights = DEFAULT_WEIGHTS
    ) -> None:
        self._disaggregation = disaggregation
        self._rng = rng
        self._weights = weights
        self._scales = (
            weights.within,
            weights.steepest,
            weights.streams,
            weights.work,
            weights.reuse,
            1.0 / weights.chunk_tokens,
        )
        # 0-d arrays: numpy takes half as long with them as with numbers.
        self._within, self._steepest = np.array(weights.within), np.array(weights.steepest)

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        """See RoutingPolicy; the terms are in seconds."""
        may = apart_or_whole(candidates, self._disaggregation, request.whole)
        apart = len(may.prefill) > 0 and len(may.decode) > 0
        if not apart and not len(may.full):
            return None
        both = len(may.prefill) + len(may.decode) > len(candidates)
        terms = self._terms(request, candidates, whole=both or len(may.full) > 0)
        best = self._apart(request, candidates, may, terms) if apart else None
        other: _Choice | None = None
        if len(may.full):
            whole = self._whole(request, candidates, may.full, terms)
            if best is None or whole.cost <= best.cost:
                # Not both at once, which mypyc takes for a tuple without None.
                other = best
                best = whole
            else:
                other = whole
        if best is None:
            return None
        tables = best.tables if other is None else (*best.tables, *other.tables)
        return _plan(request, candidates, best, terms, tables)

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        """See RoutingPolicy."""
        return missing_role(prefills, decodes, worker, self._disaggregation)

    def _terms(self, request: RequestView, candidates: Candidates, *, whole: bool) -> FloatColumn:
        """Return the cost of every place in any mode: a row for each of TERMS except `slo_s`, and a last one
        of tokens (_MISSING). `whole`: prompts may be computed where streams decode."""
        return cost_terms(
            (
                candidates.cached_tokens,
                candidates.tier_tokens,
                candidates.queued_prefill_tokens,
                candidates.waiting,
                candidates.streams,
                candidates.reserved_kv_tokens,
                candidates.held_tokens,
                candidates.kv_tokens,
            ),
            candidates.kv_token_bytes,
            candidates.rates,
            (request.prompt_tokens, request.output_tokens, request.choices, request.slo.itl_s),
            self._scales,
            whole=whole,
        )

    def _urgency(self, seconds: FloatColumn, promised_s: float) -> FloatColumn:
        """Return the weight of each of these waits."""
        used = seconds * (1.0 / max(promised_s, _SHORTEST_S))
        np.minimum(used, self._steepest, out=used)
        used += self._within
        return used

    def _whole(
        self, request: RequestView, candidates: Candidates, rows: IntColumn, terms: FloatColumn
    ) -> _Choice:
        values: FloatColumn = terms[_WHOLE].take(rows, 1)
        memory, _, queue, load, prefill, slo, *_ = values
        np.maximum(memory - queue, 0.0, out=memory)
        ttft = queue + memory + load + prefill
        np.multiply(ttft, self._urgency(ttft, request.slo.ttft_s) - 1.0, out=slo)
        costs: FloatColumn = np.add.reduce(values, 0)
        at = int(costs.argmin())
        row = rows.item(at)
        at = self._among_equals(costs, at, self._engine_s(request, candidates, prefill.item(at), row))
        table = TermTable("whole", "s", rows, TERMS[_WHOLE], values.T)
        return _Choice(None, rows.item(at), costs.item(at), ttft.item(at), (table,))

    def _apart(
        self, request: RequestView, candidates: Candidates, may: Eligible, terms: FloatColumn
    ) -> _Choice | None:
        """Return the best pair on two different workers."""
        # None if no link is known: then a place receives as fast from everywhere.
        links = candidates.links
        transfers = None if links is None else Transfers(request, candidates, links, terms[_TRANSFER])
        prefills, decodes = self._best_of_each(may, terms, transfers)
        moves = None if transfers is None else transfers.between(prefills, decodes)
        excess_s = None if moves is None else moves.excess_s
        weights = self._weights
        promise = (request.slo.ttft_s, weights.within, weights.steepest, weights.work)
        ttft, slo, costs = cost_pairs(terms, prefills, decodes, excess_s, promise)
        if len(may.prefill) + len(may.decode) > len(candidates):
            # Some places may do either part.
            worker = candidates.worker
            costs[worker[prefills][:, None] == worker[decodes]] = np.inf
        flat, width = costs.ravel(), len(decodes)
        at = int(flat.argmin())
        if flat.item(at) == np.inf:
            return None
        i, j = divmod(at, width)
        prefill_s = terms.item(_PREFILL_S, prefills.item(i))
        engine_s = self._engine_s(request, candidates, prefill_s, decodes.item(j))
        at = self._among_equals(flat, at, engine_s)
        i, j = divmod(at, width)
        if moves is not None:
            # The table of decode places is beside the chosen place that prefills.
            terms[_TRANSFER, decodes] += moves.excess_s[i]
            terms[_LINK, decodes] += moves.excess_s[i] * weights.work
        of_decode = _table("decode", _DECODE, decodes, terms, slo[i])
        if moves is not None:
            of_decode = replace(of_decode, links=moves.grid[i])
        tables = (_table("prefill", _PREFILL, prefills, terms, slo[:, j]), of_decode)
        return _Choice(prefills.item(i), decodes.item(j), flat.item(at), ttft.item(i, j), tables)

    def _best_of_each(
        self, may: Eligible, terms: FloatColumn, transfers: Transfers | None
    ) -> tuple[IntColumn, IntColumn]:
        """Return the places of either part whose pairs are compared: in a large fleet, the cheapest."""
        prefills, decodes = may.prefill, may.decode
        if len(prefills) * len(decodes) <= self._weights.pairs:
            return prefills, decodes
        side = int(self._weights.pairs**0.5)
        prefills = _cheapest(prefills, terms[_PREFILL].sum(axis=0), side)
        after: FloatColumn = terms[_DECODE].sum(axis=0)
        if transfers is not None:
            excess_s = transfers.least_excess_s(prefills)
            after += excess_s + excess_s * self._weights.work
        return prefills, _cheapest(decodes, after, side)

    def _engine_s(self, request: RequestView, candidates: Candidates, prefill_s: float, decode: int) -> float:
        """Engine time of this request, with what it adds to the steps of others."""
        streams = request.output_tokens * request.choices
        return prefill_s + streams * candidates.rates.step_stream_s.item(decode)

    def _among_equals(self, costs: FloatColumn, best: int, engine_s: float) -> int:
        """Sample two of the places that are as good as the best, and return the cheaper."""
        equal = (costs <= costs.item(best) + self._weights.tie * engine_s).nonzero()[0]
        if len(equal) < 2:
            return best
        count = len(equal)
        first = int(self._rng.random() * count)
        second = (first + 1 + int(self._rng.random() * (count - 1))) % count
        one, other = equal.item(first), equal.item(second)
        return one if costs.item(one) <= costs.item(other) else other


def _table(part: str, cells: slice, rows: IntColumn, terms: FloatColumn, slo: FloatColumn) -> TermTable:
    """Return the cost of each place beside the chosen one of the other part, whose wait is in `slo`."""
    values: FloatColumn = terms[cells].take(rows, 1)
    values[_SLO] = slo
    return TermTable(part, "s", rows, TERMS[cells], values.T)


def _cheapest(rows: IntColumn, costs: FloatColumn, most: int) -> IntColumn:
    """Return at most `most` of the rows, in order."""
    if len(rows) <= most:
        return rows
    best: IntColumn = np.sort(np.argpartition(costs[rows], most - 1)[:most])
    kept: IntColumn = rows[best]
    return kept


def _plan(
    request: RequestView,
    candidates: Candidates,
    choice: _Choice,
    terms: FloatColumn,
    tables: tuple[TermTable, ...],
) -> Plan:
    row = choice.decode if choice.prefill is None else choice.prefill
    cached = request.prompt_tokens - round(terms.item(_MISSING, row))
    mode = "aggregated" if choice.prefill is None else "disaggregated"
    return Plan(
        prefill=None if choice.prefill is None else candidates.targets[choice.prefill],
        decode=candidates.targets[choice.decode],
        reason=f"{mode}_{'prefix' if cached else 'load'}",
        predicted_cached_tokens=cached,
        predicted_ttft_s=choice.ttft_s,
        predicted_tier_tokens=_by_tier(candidates, row, cached - candidates.cached_tokens.item(row)),
        tables=tables,
    )


def _by_tier(candidates: Candidates, row: int, tokens: int) -> tuple[int, ...]:
    """Return how many of the tokens come from each tier, the faster ones first."""
    parts = []
    for held in candidates.tier_tokens[row].tolist():
        parts.append(min(held, tokens))
        tokens -= parts[-1]
    return tuple(parts)
