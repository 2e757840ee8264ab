"""What a request that ended claims of the time of its workers.

A claim is the time that a request's work took of a worker, by the figures that the request carries at its end
and the rates that the router has measured. Claims of a pool are then scaled to the time in which its workers
were busy, so that only their proportions matter. The rule and its sources are in ADR 43.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvasir.core.demand import WorkerStats
from kvasir.ports.router import LostAttempt, RequestSummary
from kvasir.ports.stores.costs import WorkSums
from kvasir.telemetry.reasons import OK

CHARGED = frozenset(
    (OK, "client_closed", "slow_reader", "content_filter", "request_timeout", "edge_overloaded")
)
"""Outcomes of requests whose work was done for their clients. Work of all others is wasted."""


class Claim(NamedTuple):
    """The claim on one worker, whose request was there from `begin_s` to `end_s` of the router's clock."""

    worker_id: str
    begin_s: float
    end_s: float
    sums: WorkSums


def claims_of(summary: RequestSummary, workers: Mapping[str, WorkerStats]) -> list[Claim]:
    """Return the claims of a request that ended, the last of them with its tokens; none if it reached no
    worker. `workers` has what is known of each worker."""
    lost: list[Claim] = []
    for attempt in summary.lost:
        lost += _lost_claims(attempt, workers)
    if summary.routed_s is None or summary.refused:
        return lost
    own = _own_claims(summary, workers)
    if summary.outcome not in CHARGED:
        own = [claim._replace(sums=_as_waste(claim.sums)) for claim in own]
    return lost + own if lost else own


def _own_claims(summary: RequestSummary, workers: Mapping[str, WorkerStats]) -> list[Claim]:
    """Return the claims of the last attempt."""
    prefiller, decoder = summary.prefill_worker, summary.decode_worker
    first = prefiller or decoder
    if first is None:
        return []
    usage, begin_s, end_s = summary.usage, summary.started_s, summary.finished_s
    prompt = usage.prompt_tokens or summary.prompt_tokens
    cached = usage.cached_tokens if usage.prompt_tokens else summary.predicted_cached_tokens
    output = max(usage.output_tokens, summary.sent_tokens)
    stats = workers.get(first)
    computing_s = prefill_s(stats, prompt - cached)
    computed_s = summary.prefill_done_s or summary.first_token_s or end_s
    if computed_s < begin_s:
        # A stream that went on after a failover: the time of its second prompt is not known.
        computed_s = min(end_s, begin_s + computing_s)
    computing_s = min(computing_s, computed_s - begin_s)
    moved_s, tier_s, held = summary.pulled_s, summary.tier_s, _held(stats, prompt)
    claims = []
    if prefiller is not None:
        kv_s = held * max(0.0, computed_s - begin_s - tier_s)
        if decoder is None:
            sums = WorkSums(1.0, prompt, cached, output, computing_s, 0.0, kv_s, held * tier_s)
            return [Claim(prefiller, begin_s, end_s, sums)]
        sums = WorkSums(0.0, 0.0, 0.0, 0.0, computing_s, 0.0, kv_s, held * (tier_s + moved_s))
        claims.append(Claim(prefiller, begin_s, min(end_s, computed_s + moved_s), sums))
        begin_s, computing_s, tier_s = computed_s, 0.0, 0.0
        stats = workers.get(decoder)
    if decoder is not None:
        first_s = summary.first_token_s
        decoded_s = 0.0 if first_s is None else max(0.0, end_s - first_s)
        held = _held(stats, prompt + output / 2)
        decoding_s = min(decode_s(stats, decoded_s, output, summary.choices), end_s - begin_s)
        kv_s = held * max(0.0, end_s - begin_s - moved_s - tier_s)
        transfer_s = held * (moved_s + tier_s)
        sums = WorkSums(1.0, prompt, cached, output, computing_s, decoding_s, kv_s, transfer_s)
        claims.append(Claim(decoder, begin_s, end_s, sums))
    return claims


def prefill_s(stats: WorkerStats | None, tokens: float) -> float:
    """Return the seconds that a worker needs for this many prompt tokens, of which it computes at least one;
    without rates, infinitely many: the time that the request took is then the bound."""
    if stats is None or not stats.prefill_token_s:
        return float("inf")
    return max(1.0, tokens) * stats.prefill_token_s


def decode_s(stats: WorkerStats | None, seconds: float, output: int, choices: int) -> float:
    """Return the share of the steps of `seconds` in which a request generated `output` tokens. A step of `b`
    streams takes `step_fixed_s + b * step_stream_s`, from which the mean `b` follows; each stream has an
    equal share of the step."""
    steps = output / choices - 1
    if steps <= 0 or stats is None or not stats.step_stream_s:
        return seconds
    streams = (seconds / steps - stats.step_fixed_s) / stats.step_stream_s
    return seconds * choices / max(streams, float(choices))


def _held(stats: WorkerStats | None, tokens: float) -> float:
    """Return the fraction of a worker's KV that this many tokens take."""
    return 0.0 if stats is None or not stats.kv_tokens else min(1.0, tokens / stats.kv_tokens)


def _as_waste(sums: WorkSums) -> WorkSums:
    """Return the same claims, charged to nobody; the request is not counted as served."""
    return WorkSums(wasted=sums.claims)


def _lost_claims(attempt: LostAttempt, workers: Mapping[str, WorkerStats]) -> list[Claim]:
    """Return what was in vain of an attempt that ended early: its prompt, and output that another attempt
    repeats."""
    lasted_s = max(0.0, attempt.end_s - attempt.begin_s)
    computed = attempt.prefill_worker or attempt.decode_worker
    stats = workers.get(computed)
    prompt_s = min(prefill_s(stats, attempt.prompt_tokens), lasted_s)
    waste = [Claim(computed, attempt.begin_s, attempt.end_s, WorkSums(wasted=prompt_s))]
    if attempt.repeated_tokens:
        stats = workers.get(attempt.decode_worker)
        step_s = lasted_s if stats is None else stats.step_stream_s * attempt.repeated_tokens
        repeated_s = min(step_s, max(0.0, lasted_s - prompt_s))
        waste.append(
            Claim(attempt.decode_worker, attempt.begin_s, attempt.end_s, WorkSums(wasted=repeated_s))
        )
    return waste
