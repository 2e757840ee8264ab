"""The endpoint that lists requests: those that run, the slowest and the newest of those that ended.

It reads what the router keeps anyway, when it is asked, so it costs serving nothing; each list is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvasir.ports.clock import Clock
from kvasir.ports.router import EndedRequests, RequestSummary, RouterPort, RunningView
from kvasir.ports.views.ended import EndedColumn
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.operation import FinishedRequest, RequestsPage, RunningRequest
from kvasir_platform.gateway.operator.timelines import rounded

REQUESTS = "/requests"
MOST_RUNNING = 200
MOST_ENDED = 50


class RequestPages:
    """GET /requests. `clock` is the router's clock."""

    def __init__(self, router: RouterPort, clock: Clock) -> None:
        self._router = router
        self._clock = clock

    def requests(self, exchange: Exchange) -> None:
        """Respond with the requests of this router."""
        now, router = self._clock.now(), self._router
        running = sorted(router.running(MOST_RUNNING), key=lambda view: view.so_far.arrival_s)
        ended = router.ended()
        queues = router.admission().values()
        page = RequestsPage(
            in_flight=router.in_flight,
            queued=sum(queue.queued + queue.parked for queue in queues),
            running=[_running(view) for view in running[:MOST_RUNNING]],
            slowest=[_finished(each, now) for each in _most(ended, "lasted_s")],
            latest=[_finished(each, now) for each in _most(ended, "finished_s")],
        )
        exchange.respond(200, msgspec.json.encode(page))


def _lasted_s(summary: RequestSummary) -> float:
    return summary.finished_s - summary.arrival_s


def _most(ended: Sequence[EndedRequests], name: EndedColumn) -> list[RequestSummary]:
    """Return the requests of all models with the largest figures, the largest first."""
    found: list[tuple[float, RequestSummary]] = []
    for of_model in ended:
        column = of_model.column(name)
        largest = np.arange(len(column))
        if len(column) > MOST_ENDED:
            # Thousands are not sorted for the sake of a few: this is read every second.
            largest = np.argpartition(column, -MOST_ENDED)[-MOST_ENDED:]
        found += [(column.item(row), of_model[row]) for row in largest.tolist()]
    found.sort(key=lambda each: -each[0])
    return [summary for _, summary in found[:MOST_ENDED]]


def _queued_s(summary: RequestSummary) -> float | None:
    return None if summary.routed_s is None else round(summary.routed_s - summary.arrival_s, 6)


def _running(view: RunningView) -> RunningRequest:
    summary = view.so_far
    return RunningRequest(
        request_id=summary.request_id,
        model=summary.model,
        tenant=summary.tenant,
        slo=summary.slo.name,
        phase=view.phase,
        age_s=round(_lasted_s(summary), 6),
        queued_s=_queued_s(summary),
        ttft_s=rounded(summary.ttft_s),
        prompt_tokens=view.prompt_tokens,
        output_tokens=view.output_tokens,
        predicted_cached_tokens=summary.predicted_cached_tokens,
        prefill_worker=summary.prefill_worker,
        decode_worker=summary.decode_worker,
        retries=summary.retries,
        migrations=summary.migrations,
    )


def _finished(summary: RequestSummary, now: float) -> FinishedRequest:
    usage = summary.usage
    return FinishedRequest(
        request_id=summary.request_id,
        model=summary.model,
        tenant=summary.tenant,
        slo=summary.slo.name,
        outcome=summary.outcome,
        ended_s_ago=round(max(0.0, now - summary.finished_s), 3),
        e2e_s=round(_lasted_s(summary), 6),
        queued_s=_queued_s(summary),
        ttft_s=rounded(summary.ttft_s),
        itl_s=rounded(summary.itl_s),
        slo_met=summary.slo_met,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        prefill_worker=summary.prefill_worker,
        decode_worker=summary.decode_worker,
        retries=summary.retries,
        migrations=summary.migrations,
    )
