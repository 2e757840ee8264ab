"""What requests that ended claim of the time of their workers.

A claim is the time that a request's work took of a worker, by the figures that the request carries at its end
and the rates that the router has measured. Claims of a pool are then scaled to the time in which its workers
were busy, so that only their proportions matter. The rule and its sources are in ADR 43.

Claims are made of many requests at once, in columns: one by one, they take twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.core.demand import WorkerStats
from kvasir.core.figures import Fields, Numbers
from kvasir.ports.router import LostAttempt, RequestSummary
from kvasir.ports.stores.costs import WorkSums
from kvasir.telemetry.reasons import OK

CHARGED = frozenset(
    (OK, "client_closed", "slow_reader", "content_filter", "request_timeout", "edge_overloaded")
)
"""Outcomes of requests whose work was done for their clients. Work of all others is wasted."""

Floats = NDArray[np.float64]
"""A column with a figure of each request."""
_FIGURES = Numbers(
    (
        "started_s",
        "finished_s",
        "prefill_done_s",
        "first_token_s",
        "pulled_s",
        "tier_s",
        "usage.prompt_tokens",
        "usage.cached_tokens",
        "usage.output_tokens",
        "prompt_tokens",
        "predicted_cached_tokens",
        "sent_tokens",
        "choices",
    )
)
"""Those of a request, times first."""
_TIMES = 6
_rates_of = attrgetter("prefill_token_s", "step_fixed_s", "step_stream_s", "kv_tokens")
_UNKNOWN = (0.0, 0.0, 0.0, 0.0)


class Claim(NamedTuple):
    """The claim on one worker, whose request was there from `begin_s` to `end_s` of the router's clock."""

    worker_id: str
    begin_s: float
    end_s: float
    sums: WorkSums


class Claims(NamedTuple):
    """Claims of several requests, each on one worker: when the requests were there, on the router's clock,
    and a column of claims for each field of WorkSums."""

    begin_s: Floats
    end_s: Floats
    sums: tuple[Floats, ...]

    def claim(self, row: int, worker_id: str) -> Claim:
        """Return one of them, which is on this worker."""
        sums = WorkSums(*(column.item(row) for column in self.sums))
        return Claim(worker_id, self.begin_s.item(row), self.end_s.item(row), sums)


class PairedClaims(NamedTuple):
    """Claims of requests that reached workers: of each on the worker that computed its prompt for another
    one, zeros if none did, and on the worker that had it at its end, the latter with its tokens."""

    apart: NDArray[np.bool_]
    first: Claims
    last: Claims


class RequestKind(NamedTuple):
    """What requests have in common whose claims are added up: the workers of their last attempts, and how
    they are grouped."""

    prefiller: str | None
    decoder: str | None
    tenant: str
    key: str
    model: str
    slo: str

    @property
    def last(self) -> str:
        """The worker that has a request at its end; "" if it reached none."""
        return self.decoder or self.prefiller or ""

    @property
    def labels(self) -> tuple[str, str, str, str]:
        """The fields of a CostGroup that a request decides."""
        return self[2:]


_FACTS = Fields(
    (
        "prefill_worker",
        "decode_worker",
        "tenant",
        "key",
        "model",
        "slo.name",
        "routed_s",
        "refused",
        "outcome",
        "lost",
    )
)
OF_KIND = len(RequestKind._fields)
"""So many facts of a request, the first ones, are the fields of its RequestKind."""
_ROUTED, _REFUSED, _OUTCOME, _LOST = range(OF_KIND, OF_KIND + 4)

Facts = tuple[Any, ...]
"""What decides which claims a request has, other than its figures."""


def facts_of(summaries: Sequence[RequestSummary]) -> list[Facts]:
    """Return the facts of each request. Read one by one, they take several times as long."""
    return _FACTS.of(summaries)


def reached(facts: Facts) -> bool:
    """Return whether the last attempt of a request has claims: it reached a worker."""
    worker = facts[1] or facts[0]
    return worker is not None and facts[_ROUTED] is not None and not facts[_REFUSED]


def lost_some(facts: Facts) -> bool:
    """Return whether a request has attempts that ended before it did."""
    return bool(facts[_LOST])


def paired_claims(
    summaries: Sequence[RequestSummary],
    facts: Sequence[Facts],
    kinds: Sequence[RequestKind],
    kind: NDArray[np.intp],
    workers: Mapping[str, WorkerStats],
) -> PairedClaims:
    """Return the claims of the last attempts of requests that have some, with their facts. `kind` says which
    of `kinds` each of them is, and `workers` has what is known of each worker."""
    times, tokens = np.split(_FIGURES.of(summaries), [_TIMES])
    begin, end, done, first, moved, tier = times
    used, used_cached, generated, prompt, cached, sent, choices = tokens
    prompt, cached = np.where(used > 0, used, prompt), np.where(used > 0, used_cached, cached)
    output = np.maximum(generated, sent)
    prefills = np.array([each.prefiller is not None for each in kinds])[kind]
    decodes = np.array([each.decoder is not None for each in kinds])[kind]
    apart = prefills & decodes
    token_s, _, _, kv_tokens = _rates([each.prefiller or each.decoder for each in kinds], workers)[:, kind]
    _, step_fixed_s, step_stream_s, decoder_kv = _rates([each.decoder for each in kinds], workers)[:, kind]

    computing = np.maximum(1.0, prompt - cached) * np.where(token_s > 0, token_s, math.inf)
    computed = np.where(np.isnan(done), np.where(np.isnan(first), end, first), done)
    # A stream that went on after a failover: the time of its second prompt is not known.
    computed = np.where(computed < begin, np.minimum(end, begin + computing), computed)
    computing = np.minimum(computing, computed - begin)
    held = _held(prompt, kv_tokens)
    until_computed = held * np.maximum(0.0, computed - begin - tier)
    nothing = np.zeros(len(summaries))
    prefill = (*(nothing,) * 4, computing, nothing, until_computed, held * (tier + moved), nothing)

    last_begin = np.where(apart, computed, begin)
    tier = np.where(apart, 0.0, tier)
    decoded = np.where(np.isnan(first), 0.0, np.maximum(0.0, end - first))
    decoding = np.minimum(_decode_s(step_fixed_s, step_stream_s, decoded, output, choices), end - last_begin)
    decoder_held = _held(prompt + output / 2, decoder_kv)
    whole = decoder_held * np.maximum(0.0, end - last_begin - moved - tier)
    last = (
        nothing + 1.0,
        prompt,
        cached,
        output,
        np.where(apart, 0.0, computing),
        np.where(decodes, decoding, 0.0),
        np.where(decodes, whole, until_computed),
        np.where(decodes, decoder_held * (moved + tier), held * tier),
        nothing,
    )
    charged = np.frombuffer(bytes([each[_OUTCOME] in CHARGED for each in facts]), np.bool_)
    return PairedClaims(
        apart,
        Claims(begin, np.minimum(end, computed + moved), _charged(prefill, charged)),
        Claims(last_begin, end, _charged(last, charged)),
    )


def _rates(names: Sequence[str | None], workers: Mapping[str, WorkerStats]) -> Floats:
    """Return a row for each of _rates_of, with a column for each worker; zeros for an unknown one."""
    known = [None if name is None else workers.get(name) for name in names]
    return np.array([_UNKNOWN if each is None else _rates_of(each) for each in known], np.float64).T


def _held(tokens: Floats, kv_tokens: Floats) -> Floats:
    """Return the fraction of a worker's KV that so many tokens take; 0 if its size is not known."""
    return np.where(kv_tokens > 0, np.minimum(1.0, tokens / np.maximum(kv_tokens, 1.0)), 0.0)


def _decode_s(
    step_fixed_s: Floats, step_stream_s: Floats, seconds: Floats, output: Floats, choices: Floats
) -> Floats:
    """Return the share of the steps of `seconds` in which a request generated `output` tokens. A step of `b`
    streams takes `step_fixed_s + b * step_stream_s`, from which the mean `b` follows; each stream has an
    equal share of the step."""
    steps = output / choices - 1
    known = (steps > 0) & (step_stream_s > 0)
    of_step = seconds / np.where(known, steps, 1.0)
    streams = (of_step - step_fixed_s) / np.where(known, step_stream_s, 1.0)
    return np.where(known, seconds * choices / np.maximum(streams, choices), seconds)


def _charged(sums: tuple[Floats, ...], charged: NDArray[np.bool_]) -> tuple[Floats, ...]:
    """Return the claims; of requests that are not `charged`, all of them as waste, and none is counted."""
    if charged.all():
        return sums
    *kept, _ = (np.where(charged, column, 0.0) for column in sums)
    return (*kept, np.where(charged, 0.0, sums[4] + sums[5] + sums[6] + sums[7]))


def claims_of(summary: RequestSummary, workers: Mapping[str, WorkerStats]) -> list[Claim]:
    """Return the claims of one request, those of its lost attempts first."""
    claims = list(lost_claims(summary, workers))
    facts = facts_of([summary])
    if reached(facts[0]):
        kind = RequestKind(*facts[0][:OF_KIND])
        apart, first, last = paired_claims([summary], facts, [kind], np.zeros(1, np.intp), workers)
        if apart.item(0):
            claims.append(first.claim(0, kind.prefiller or ""))
        claims.append(last.claim(0, kind.last))
    return claims


def lost_claims(summary: RequestSummary, workers: Mapping[str, WorkerStats]) -> Iterator[Claim]:
    """Yield what was in vain of the attempts of a request that ended before it did."""
    for attempt in summary.lost:
        yield from _lost_claims(attempt, workers)


def _lost_claims(attempt: LostAttempt, workers: Mapping[str, WorkerStats]) -> Iterator[Claim]:
    """Yield what was in vain of an attempt that ended early: its prompt, and output that another attempt
    repeats."""
    begin_s, end_s, decoder = attempt.begin_s, attempt.end_s, attempt.decode_worker
    lasted_s = max(0.0, end_s - begin_s)
    computed = attempt.prefill_worker or decoder
    stats = workers.get(computed)
    prompt_s = lasted_s
    if stats is not None and stats.prefill_token_s:
        prompt_s = min(max(1.0, attempt.prompt_tokens) * stats.prefill_token_s, lasted_s)
    yield Claim(computed, begin_s, end_s, WorkSums(wasted=prompt_s))
    if attempt.repeated_tokens:
        stats = workers.get(decoder)
        step_s = lasted_s if stats is None else stats.step_stream_s * attempt.repeated_tokens
        yield Claim(decoder, begin_s, end_s, WorkSums(wasted=min(step_s, max(0.0, lasted_s - prompt_s))))
