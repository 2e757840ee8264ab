"""Where the time of a request went, as phases that follow each other from its arrival to its end.

The router's own times bound the phases. What an engine did within them it reports as durations, which are
placed in the order in which engines work: waiting, reading tiers, computing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvasir.ports.router import RequestSummary
from kvasir.ports.stores.costs import WorkSums
from kvasir_platform.gateway.openai.schema.operation import (
    PhaseName,
    RequestTimeline,
    TimelinePhase,
    WorkerClaim,
)


def timeline_of(
    summary: RequestSummary,
    running: str | None,
    prompt_tokens: int,
    sent: int,
    claims: Mapping[tuple[str, str], WorkSums] | None = None,
) -> RequestTimeline:
    """Return the timeline of a request; `running` is its phase if it has not ended, `sent` the tokens that
    its client has, and `claims` what it claims by worker and pool."""
    usage = summary.usage
    return RequestTimeline(
        request_id=summary.request_id,
        model=summary.model,
        tenant=summary.tenant,
        slo=summary.slo.name,
        outcome=None if running is not None else summary.outcome,
        running=running,
        total_s=round(summary.finished_s - summary.arrival_s, 6),
        ttft_s=rounded(summary.ttft_s),
        itl_s=rounded(summary.itl_s),
        slo_met=None if running is not None else summary.slo_met,
        prompt_tokens=prompt_tokens,
        output_tokens=sent,
        cached_tokens=usage.cached_tokens,
        transferred_bytes=usage.transferred_bytes,
        retries=summary.retries,
        migrations=summary.migrations,
        phases=list(phases_of(summary)),
        route=None if summary.route_arm is None else summary.route_arm.route,
        arm=None if summary.route_arm is None else summary.route_arm.arm,
        claims=None if claims is None else [_claim(*place, sums) for place, sums in claims.items()],
    )


def phases_of(summary: RequestSummary) -> Iterator[TimelinePhase]:
    """Yield the phases that the request has reached, without empty ones."""
    arrival, end = summary.arrival_s, summary.finished_s
    routed, first = summary.routed_s, summary.first_token_s
    prompt_worker = summary.prefill_worker or summary.decode_worker
    apart = summary.prefill_worker is not None and summary.decode_worker is not None
    computed = summary.prefill_done_s if apart else first
    marks: list[tuple[PhaseName, float, str | None]] = [("queue", end if routed is None else routed, None)]
    if routed is not None:
        until = end if computed is None else computed
        waited = min(until, routed + summary.waited_s)
        marks.append(("engine_queue", waited, prompt_worker))
        marks.append(("tiers", min(until, waited + summary.tier_s), prompt_worker))
        marks.append(("prefill", until, prompt_worker))
        if apart and computed is not None:
            begun = end if first is None else first
            marks.append(("transfer", min(begun, computed + summary.pulled_s), summary.decode_worker))
            marks.append(("decode", begun, summary.decode_worker))
        if first is not None:
            marks.append(("stream", end, summary.decode_worker or summary.prefill_worker))
    at = arrival
    for phase, until_s, worker in marks:
        if until_s > at:
            yield TimelinePhase(phase, round(at - arrival, 6), round(until_s - arrival, 6), worker)
            at = until_s


def _claim(worker_id: str, pool: str, sums: WorkSums) -> WorkerClaim:
    phases = (sums.prefill, sums.decode, sums.kv, sums.transfer, sums.wasted)
    return WorkerClaim(worker_id, pool, *(round(seconds, 6) for seconds in phases))


def rounded(seconds: float | None) -> float | None:
    """Return seconds to the microsecond."""
    return None if seconds is None else round(seconds, 6)
