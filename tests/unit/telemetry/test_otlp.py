"""Spans are exported as OpenTelemetry's own exporter would export them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from tests.kit.gateway.otlp_collector import collector

from kvasir.core.requests import Delta, EngineRequest, FinishReason, Leg, Sampling, Timings, Usage, token_ids
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.leg_spans import LegSpanRecorder
from kvasir.telemetry.otlp import exporter
from kvasir.telemetry.spans import SpanRecorder

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
USAGE = Usage(prompt_tokens=100, cached_tokens=64, transferred_bytes=2**40, output_tokens=11)
SUMMARY = RequestSummary(
    request_id="r-ü",
    model="m",
    outcome="ok",
    arrival_s=10.0,
    routed_s=10.2,
    prefill_done_s=10.5,
    first_token_s=11.0,
    finished_s=12.0,
    transfer_s=0.25,
    tier_s=0.1,
    prefill_worker="p-0",
    decode_worker="d-0",
    usage=USAGE,
)


class Kept(SpanProcessor):
    """Keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def calls(parent: str, state: str, *summaries: RequestSummary) -> list[ReadableSpan]:
    kept = Kept()
    recorder = SpanRecorder(kept, "kvasir", lambda: 10**18, random.Random(1))
    trace = recorder.begin(parent, state)
    recorder.record(trace, summaries, now_s=12.0, admitted_s=10.1, missed=False)
    return kept.spans


def legs(finish: FinishReason, error: str | None) -> list[ReadableSpan]:
    kept = Kept()
    recorder = LegSpanRecorder(kept, "kvasir", "w-0", lambda: 10**18, rng=random.Random(1))
    request = EngineRequest(
        "r", token_ids(range(4)), Sampling(), Leg.DECODE, trace_context=f"{PARENT} vendor=1,other=2"
    )
    timings = Timings(queue_s=0.1, tier_s=0.1, transfer_s=0.1, prefill_s=0.1, decode_s=0.1)
    last = Delta("r", 0, finish=finish, last=True, usage=USAGE, timings=timings, error=error)
    recorder.record(request, last, elapsed_s=1.0)
    return kept.spans


@pytest.mark.parametrize(
    "spans",
    [
        calls("", "", SUMMARY),
        calls(PARENT, "vendor=1,other=2", SUMMARY),
        calls("", "", SUMMARY, replace(SUMMARY, outcome="worker_lost")),
        calls("", "", replace(SUMMARY, routed_s=None, outcome="queue_timeout")),
        legs(FinishReason.STOP, None),
        legs(FinishReason.ERROR, "engine_error"),
        [],
    ],
)
def test_spans_are_encoded_as_the_library_encodes_them(spans: Sequence[ReadableSpan]) -> None:
    assert exporter.encoded(spans) == encode_spans(spans)


def test_the_librarys_exporter_sends_what_is_encoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    original = exporter.encoded

    def noted(spans: Sequence[ReadableSpan]) -> object:
        encoded.append(len(spans))
        return original(spans)

    monkeypatch.setattr(exporter, "encoded", noted)
    with collector() as receiver:
        processor = exporter.otlp_processor(receiver.address)
        made = calls("", "", SUMMARY)
        for span in made:
            processor.on_end(span)
        processor.shutdown()
        received = [each.span for each in receiver.spans]
    assert encoded == [len(made)]
    assert received == list(encode_spans(made).resource_spans[0].scope_spans[0].spans)
