"""A decision record is available from the moment of the decision, and contains its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvasir.core.errors import UpstreamError
from kvasir.core.requests import Request, Sampling, token_ids
from kvasir.ports.router import DecisionRecord, RequestSummary
from kvasir_platform.sim.cluster import ClientStream, Cluster
from kvasir_platform.sim.stories import simulate
from kvasir_platform.sim.stories import small_deployment as deployment

LONG = Sampling(max_tokens=500, temperature=0.0, ignore_eos=True)


def explained(cluster: Cluster, request_id: str) -> DecisionRecord:
    record = cluster.router.explain(request_id)
    assert record is not None
    return record


class Asking(ClientStream):
    """A client that asks for the reasons as soon as it hears of the end."""

    def __init__(self, request: Request, cluster: Cluster) -> None:
        super().__init__(request)
        self.cluster = cluster
        self.answer: DecisionRecord | None = None

    def on_finish(self, summary: RequestSummary) -> None:
        self.answer = self.cluster.router.explain(self.request.request_id)
        super().on_finish(summary)


def test_a_record_is_there_while_the_request_runs_and_complete_when_its_client_hears_of_the_end() -> None:
    async def story(cluster: Cluster) -> None:
        now = cluster.clock.now()
        request = Request("r", cluster.deployment.model.name, token_ids(range(100)), LONG, arrival_s=now)
        stream = Asking(request, cluster)
        cluster.router.submit(request, stream)
        record = explained(cluster, "r")
        assert (record.outcome, record.attempt, record.mode) == (None, 1, "disaggregated")
        assert {part.part: len(part.places) for part in record.parts} == {"prefill": 2, "decode": 2}
        summary = await stream.finished()
        ended = stream.answer
        assert ended is not None
        assert (ended.outcome, ended.actual_cached_tokens, ended.slo_met) == ("ok", 0, True)
        assert (ended.actual_ttft_s, ended.actual_itl_s) == (summary.ttft_s, summary.itl_s)
        assert (ended.prefill_worker, ended.decode_worker) == (summary.prefill_worker, summary.decode_worker)

    simulate(deployment(), story)


def test_a_retry_is_another_attempt_with_the_workers_that_served_it() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(4000))
        await cluster.clock.sleep(0.05)
        (busy,) = [w for w, worker in cluster.workers.items() if worker.host.live_requests]
        await cluster.kill(busy)
        await cluster.forget(busy)
        summary = await stream.finished()
        record = explained(cluster, stream.request.request_id)
        assert (record.attempt, record.outcome) == (2, "ok")
        assert record.prefill_worker == summary.prefill_worker != busy
        assert busy not in {place.worker_id for part in record.parts for place in part.places}

    simulate(deployment(), story)


def test_a_lost_worker_and_a_lost_client_are_told_apart() -> None:
    async def story(cluster: Cluster) -> None:
        # Draws without a seed that count output cannot go on elsewhere.
        drawn = replace(LONG, temperature=1.0, presence_penalty=0.5)
        lost, left = cluster.submit(range(64), drawn), cluster.submit(range(1000, 1064), LONG)
        await asyncio.gather(lost.started.wait(), left.started.wait())
        cluster.router.cancel(left.request.request_id)
        await cluster.kill(explained(cluster, lost.request.request_id).decode_worker)
        with pytest.raises(UpstreamError):
            await lost.finished()
        records = [explained(cluster, stream.request.request_id) for stream in (lost, left)]
        assert [(record.outcome, record.slo_met) for record in records] == [
            ("worker_lost", False),
            ("client_closed", None),
        ]

    simulate(deployment(), story)


def test_only_the_newest_decisions_outlive_their_requests() -> None:
    spec = deployment()
    routing = spec.routing.model_copy(update={"decision_records": 3})

    async def story(cluster: Cluster) -> None:
        names = []
        for i in range(5):
            stream = cluster.submit(range(i, i + 40))
            await stream.finished()
            names.append(stream.request.request_id)
        assert [cluster.router.explain(name) is not None for name in names] == [
            False,
            False,
            True,
            True,
            True,
        ]

    simulate(spec.model_copy(update={"routing": routing}), story)
