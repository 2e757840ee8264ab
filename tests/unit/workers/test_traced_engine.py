"""A trace shows the legs of a request inside its workers, and what the engine did in them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.kit.clocks import StillClock
from tests.kit.engines.stub_engine import StubEngine

from kvasir.core.requests import (
    DEFAULT_SLO,
    Delta,
    EngineRequest,
    FinishReason,
    Leg,
    Sampling,
    SloClass,
    StepBatch,
    Timings,
    Usage,
)
from kvasir.telemetry.leg_spans import LegSpanRecorder
from kvasir_workers.engines.traced import TracedEngine

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALL = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{CALL}-01"
NOW_NS = 1_700_000_000_000_000_000


class Worker:
    """A traced engine that has started, and the spans that it exported."""

    def __init__(self, slo: SloClass = DEFAULT_SLO) -> None:
        self.exporter, self.clock, self.engine = InMemorySpanExporter(), StillClock(1000.0), StubEngine()
        processor = SimpleSpanProcessor(self.exporter)
        spans = LegSpanRecorder(processor, "chat", "decode-1", lambda: NOW_NS, slo=slo)
        self.traced = TracedEngine(self.engine, spans, self.clock)
        self.seen: list[StepBatch] = []

    def submit(self, leg: Leg = Leg.DECODE, trace: str = SAMPLED, slo: SloClass | None = None) -> None:
        request = EngineRequest(
            "r", array("I", (1, 2, 3)), Sampling(max_tokens=4), leg=leg, trace_context=trace, slo=slo
        )
        self.traced.submit([request])

    def end(self, **fields: Any) -> None:
        self.engine.say(Delta("r", 0, last=True, **{"finish": FinishReason.STOP, **fields}))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
async def worker() -> Worker:
    made = Worker()
    await made.traced.start(made.seen.append, worker_id="decode-1", epoch=1)
    return made


def lasted(span: ReadableSpan) -> tuple[float, float]:
    """Begin and duration in seconds, the begin relative to the end of the leg."""
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.start_time - NOW_NS) / 1e9, 6), round((span.end_time - span.start_time) / 1e9, 6)


async def test_a_leg_is_a_span_of_its_call_with_the_stages_of_the_engine(worker: Worker) -> None:
    worker.submit()
    worker.clock.at += 2.0
    worker.end(
        usage=Usage(prompt_tokens=3, transferred_bytes=4096, output_tokens=9),
        timings=Timings(queue_s=0.1, transfer_s=0.2, prefill_s=0.3, decode_s=1.0),
    )
    spans = worker.spans()
    leg = spans.pop("leg.decode")
    assert leg.parent is not None
    assert leg.context is not None
    assert (f"{leg.parent.trace_id:032x}", f"{leg.parent.span_id:016x}") == (TRACE, CALL)
    assert leg.resource.attributes["service.instance.id"] == "decode-1"
    assert leg.attributes is not None
    assert leg.attributes["kvasir.output_tokens"] == 9
    assert lasted(leg) == (-2.0, 2.0)
    assert {name: lasted(span) for name, span in spans.items()} == {
        "engine.queue": (-2.0, 0.1),
        "engine.pull": (-1.9, 0.2),
        "engine.prefill": (-1.7, 0.3),
        "engine.decode": (-1.4, 1.0),
    }
    assert {span.parent.span_id for span in spans.values() if span.parent} == {leg.context.span_id}


async def test_a_leg_that_failed_says_why(worker: Worker) -> None:
    worker.submit(Leg.PREFILL)
    worker.end(finish=FinishReason.ERROR, error="transfer_failed")
    leg = worker.spans()["leg.prefill"]
    assert not leg.status.is_ok
    assert leg.status.description == "transfer_failed"


@pytest.mark.parametrize("trace", ["", SAMPLED[:-2] + "00"])
async def test_a_leg_without_a_sampled_trace_has_no_span(worker: Worker, trace: str) -> None:
    worker.submit(trace=trace)
    worker.end()
    assert worker.spans() == {}
    assert len(worker.seen) == 1


async def test_a_refused_second_leg_of_a_name_does_not_end_the_first(worker: Worker) -> None:
    worker.submit()
    worker.submit()
    worker.end(finish=FinishReason.ERROR, error="duplicate_request")
    assert worker.spans() == {}
    worker.end()
    assert "leg.decode" in worker.spans()


@pytest.mark.parametrize(
    ("elapsed_s", "fields", "written"),
    [
        (1.0, {}, False),
        (9.0, {}, True),
        (1.0, {"finish": FinishReason.ERROR, "error": "engine_dead"}, True),
    ],
    ids=["quick", "slow", "failed"],
)
async def test_under_tail_sampling_slow_and_failed_legs_are_recorded(
    worker: Worker, elapsed_s: float, fields: dict[str, Any], written: bool
) -> None:
    worker.submit(trace=f"00-{TRACE}-{CALL}-00 kvasir=tail")
    worker.clock.at += elapsed_s
    worker.end(usage=Usage(prompt_tokens=3, output_tokens=9), **fields)
    spans = worker.spans()
    assert ("leg.decode" in spans) is written
    assert all(span.context and f"{span.context.trace_id:032x}" == TRACE for span in spans.values())


@pytest.mark.parametrize(
    ("slo", "written"),
    [
        (SloClass("chat", ttft_s=0.5, itl_s=0.1), True),
        (SloClass("batch", ttft_s=60.0, itl_s=1.0), False),
        (None, False),
    ],
    ids=["of a strict class", "of a patient class", "of a router that does not say"],
)
async def test_a_leg_is_slow_by_its_own_class(worker: Worker, slo: SloClass | None, written: bool) -> None:
    worker.submit(trace=f"00-{TRACE}-{CALL}-00 kvasir=tail", slo=slo)
    worker.clock.at += 2.0
    worker.end(usage=Usage(prompt_tokens=3, output_tokens=9))
    assert ("leg.decode" in worker.spans()) is written


async def test_a_leg_without_a_class_is_slow_by_that_of_its_worker() -> None:
    made = Worker(SloClass("any", ttft_s=0.5, itl_s=0.1))
    await made.traced.start(made.seen.append, worker_id="decode-1", epoch=1)
    made.submit(trace=f"00-{TRACE}-{CALL}-00 kvasir=tail")
    made.clock.at += 2.0
    made.end(usage=Usage(prompt_tokens=3, output_tokens=9))
    assert "leg.decode" in made.spans()
