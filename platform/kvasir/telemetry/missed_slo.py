"""Which promise of its SLO class a request broke, and what took the time: the difference between a problem of
first tokens and one of the tokens after them, for metrics, alerts and the verdict on a deployment."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.ports.router import RequestSummary
from kvasir.telemetry.reasons import OK

FAILED = "failed"
TTFT_CAUSES = ("queue", "tier", "prefill", "transfer", "decode")
"""What the time before a first token is spent on: waiting in the router and in engines, reading KV from
tiers, computing the prompt, pulling its KV, the first step of the decode worker."""
ITL_CAUSES = ("decode", "moved")
"""What tokens wait for: steps of the engine, or a stream's continuation on another worker."""


@dataclass(frozen=True, slots=True)
class SloMiss:
    """`promise`: success, ttft or itl. `cause`: `failed`, or what took most of the time: one of TTFT_CAUSES
    or ITL_CAUSES. `worker` is where that was, None for the router's queue and for requests that failed."""

    promise: str
    cause: str
    worker: str | None = None


def slo_miss(summary: RequestSummary) -> SloMiss | None:
    """Return what an ended request missed first; None if it met its class or is not judged."""
    if summary.slo_met is not False:
        return None
    if summary.outcome != OK:
        return SloMiss("success", FAILED)
    ttft = summary.ttft_s
    if ttft is not None and ttft > summary.slo.ttft_s:
        times = time_to_first_token_of(summary)
        cause = max(times, key=lambda each: times[each])
        return SloMiss("ttft", cause, _worker_of(summary, cause))
    return SloMiss("itl", "moved" if summary.migrations else "decode", summary.decode_worker)


def time_to_first_token_of(summary: RequestSummary) -> dict[str, float]:
    """Return the seconds before the first token by TTFT_CAUSES, of a request that has one."""
    first, routed = summary.first_token_s or 0.0, summary.routed_s
    routed = summary.arrival_s if routed is None else routed
    apart = summary.prefill_worker is not None and summary.decode_worker is not None
    computed = first if not apart or summary.prefill_done_s is None else min(first, summary.prefill_done_s)
    working = max(0.0, computed - routed)
    waited = min(working, summary.waited_s)
    tier = min(working - waited, summary.tier_s)
    transfer = min(first - computed, summary.pulled_s)
    return {
        "queue": routed - summary.arrival_s + waited,
        "tier": tier,
        "prefill": working - waited - tier,
        "transfer": transfer,
        "decode": first - computed - transfer,
    }


def _worker_of(summary: RequestSummary, cause: str) -> str | None:
    if cause in ("transfer", "decode"):
        return summary.decode_worker
    in_router = summary.routed_s is not None and summary.routed_s - summary.arrival_s > summary.waited_s
    return None if cause == "queue" and in_router else summary.prefill_worker or summary.decode_worker
