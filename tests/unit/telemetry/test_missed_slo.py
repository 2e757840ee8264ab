"""Which promise a request broke, and what took the time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvasir.core.requests import SloClass, Usage
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.missed_slo import ITL_CAUSES, TTFT_CAUSES, SloMiss, slo_miss

APART = RequestSummary(
    "r",
    "m",
    "ok",
    arrival_s=10.0,
    routed_s=10.1,
    waited_s=0.1,
    tier_s=0.1,
    prefill_done_s=10.5,
    pulled_s=0.1,
    first_token_s=10.7,
    finished_s=11.7,
    prefill_worker="p-0",
    decode_worker="d-0",
    usage=Usage(prompt_tokens=100, output_tokens=11),
    slo=SloClass("chat", ttft_s=1.0, itl_s=0.2),
)
LATE = replace(APART, prefill_done_s=13.0, first_token_s=13.1)
WHOLE = replace(APART, prefill_worker=None, prefill_done_s=None, pulled_s=0.0)


@pytest.mark.parametrize(
    ("summary", "miss"),
    [
        (APART, None),
        (replace(APART, outcome="client_closed", first_token_s=30.0), None),
        (replace(APART, outcome="worker_lost"), SloMiss("success", "failed")),
        (replace(APART, arrival_s=1.0), SloMiss("ttft", "queue")),
        (replace(LATE, waited_s=2.0), SloMiss("ttft", "queue", "p-0")),
        (replace(LATE, tier_s=2.0), SloMiss("ttft", "tier", "p-0")),
        (LATE, SloMiss("ttft", "prefill", "p-0")),
        (replace(APART, pulled_s=2.0, first_token_s=12.6), SloMiss("ttft", "transfer", "d-0")),
        (replace(APART, first_token_s=12.6), SloMiss("ttft", "decode", "d-0")),
        (replace(APART, finished_s=15.0), SloMiss("itl", "decode", "d-0")),
        (replace(APART, finished_s=15.0, migrations=1), SloMiss("itl", "moved", "d-0")),
        (replace(WHOLE, first_token_s=13.0), SloMiss("ttft", "prefill", "d-0")),
    ],
    ids=[
        "met", "not judged", "failed", "router's queue", "engine's queue", "tier", "prefill", "transfer",
        "first step", "steps", "moved", "whole: prefill",
    ],
)  # fmt: skip
def test_a_miss_has_the_promise_that_was_broken_first_and_what_took_most_time(
    summary: RequestSummary, miss: SloMiss | None
) -> None:
    assert slo_miss(summary) == miss
    assert miss is None or miss.cause in {"failed", *TTFT_CAUSES, *ITL_CAUSES}


def test_misses_are_counted_by_model_class_promise_and_cause() -> None:
    metrics = Metrics(CollectorRegistry(), ["m", "n"], ["chat"])
    metrics.request_finished(APART)
    metrics.request_finished(replace(LATE, model="n"))
    metrics.request_finished(replace(LATE, model="made-up"))
    metrics.request_finished(replace(APART, arrival_s=1.0))
    lines = [
        line
        for line in metrics.render().decode().splitlines()
        if line.startswith("kvasir_slo_missed_requests_total")
    ]
    assert sorted(lines) == [
        f'kvasir_slo_missed_requests_total{{cause="{cause}",model="{model}",promise="ttft",slo="chat"}} 1.0'
        for cause, model in (("prefill", "n"), ("prefill", "other"), ("queue", "m"))
    ]
