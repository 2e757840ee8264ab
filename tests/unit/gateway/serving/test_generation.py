"""A call ends once, reports exact usage, and releases its workers, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from tests.kit.clocks import SteppedClock
from tests.kit.gateway.api_answers import RecordingWire, exchange_on, ids
from tests.kit.gateway.scripted_router import ScriptedRouter, ScriptedStream

from kvasir.core.errors import KvasirError, UpstreamError
from kvasir.core.requests import Delta, FinishReason, Request, Sampling, Usage
from kvasir.native import StreamGaps
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.gateway.serving.generation import Generation, server_timing


class Kept:
    """An answer that keeps what it is given; `ends` names choices to end when text of theirs comes."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, str]] = []
        self.finished: tuple[Usage, bytes] | None = None
        self.failed: KvasirError | None = None
        self.ends: set[int] = set()
        self.generation: Generation

    def delta(self, index: int, delta: Delta) -> None:
        self.texts.append((index, delta.text))
        if index in self.ends:
            self.generation.end_choice(index)

    def lane(self, index: int, gaps: StreamGaps) -> None:
        """Takes the ordinary way."""

    def finish(self, usage: Usage, timing: bytes) -> None:
        assert self.finished is None
        assert self.failed is None
        self.finished = usage, timing

    def fail(self, error: KvasirError) -> None:
        assert self.finished is None
        assert self.failed is None
        self.failed = error


class Call:
    """A call of `prompts` prompts with `n` choices each, on a scripted router."""

    def __init__(self, prompts: int = 1, n: int = 1, spans: SpanRecorder | None = None) -> None:
        self.clock = SteppedClock(10.0)
        self.router = ScriptedRouter(self.clock)
        self.metrics = Metrics(CollectorRegistry(), ["m"])
        self.answer = Kept()
        self.exchange = exchange_on(RecordingWire())
        self.ended: list[Usage] = []
        options: dict[str, Any] = {} if spans is None else {"trace": spans.begin()}
        self.generation = self.answer.generation = Generation(
            self.exchange,
            self.answer,
            router=self.router,
            metrics=self.metrics,
            spans=spans,
            clock=self.clock,
            on_end=lambda generation: self.ended.append(generation.usage),
            **options,
        )
        requests = [
            Request(f"r-{i}", "m", ids(1, 2, 3), Sampling(n=n), arrival_s=9.0) for i in range(prompts)
        ]
        self.generation.start(requests)

    @property
    def streams(self) -> list[ScriptedStream]:
        return self.router.streams

    def counted(self, outcome: str) -> float:
        """How many requests ended so."""
        line = f'kvasir_requests_total{{model="m",outcome="{outcome}"}} '
        shown = self.metrics.render().decode()
        return float(shown.partition(line)[2].partition("\n")[0] or 0)

    def output_tokens(self) -> float:
        shown = self.metrics.render().decode()
        return float(shown.partition('kvasir_output_tokens_total{model="m"} ')[2].partition("\n")[0])


async def test_a_call_that_its_client_left_counts_what_it_was_given() -> None:
    call = Call(prompts=2)
    for stream in call.streams:
        stream.emit("a")
        stream.emit("b")
    call.exchange.gone("client_closed")
    assert call.router.cancelled == ["r-0", "r-1"]
    assert call.ended == [Usage(prompt_tokens=6, output_tokens=4)]
    assert call.counted("client_closed") == 2
    assert call.output_tokens() == 4


@pytest.mark.parametrize("how", ["cut", "gone", "failed"])
async def test_a_call_that_ends_early_counts_what_was_cached_of_its_prompt(how: str) -> None:
    call = Call()
    stream = call.streams[0]
    stream.emit("a", usage=Usage(prompt_tokens=3, cached_tokens=2, output_tokens=1))
    stream.emit("b")
    if how == "cut":
        call.answer.ends = {0}
        stream.emit("bad")
        await asyncio.sleep(0)
    elif how == "gone":
        stream.emit("c")
        call.exchange.gone("client_closed")
    else:
        stream.emit("c")
        summary = RequestSummary("r-0", "m", "worker_lost", arrival_s=9.0, finished_s=10.0)
        stream.sink.on_error(UpstreamError("gone", code="worker_lost"), summary)
    assert call.ended == [Usage(prompt_tokens=3, cached_tokens=2, output_tokens=3)]


async def test_a_leg_that_failed_counts_what_the_client_was_given_of_it() -> None:
    call = Call(prompts=2)
    call.streams[0].emit("a")
    summary = RequestSummary("r-1", "m", "worker_lost", arrival_s=9.0, finished_s=10.0)
    call.streams[1].emit("b")
    call.streams[1].sink.on_error(UpstreamError("gone", code="worker_lost"), summary)
    assert call.answer.failed is not None
    assert call.ended == [], "one leg runs on until the loop's next turn"
    await asyncio.sleep(0)
    assert call.router.cancelled == ["r-0"]
    assert call.ended == [Usage(prompt_tokens=6, output_tokens=2)]


async def test_a_choice_that_is_ended_here_takes_its_leg_off_the_worker() -> None:
    call = Call()
    call.answer.ends = {0}
    call.streams[0].emit("bad")
    assert call.router.cancelled == [], "not from within the router's fan-out"
    await asyncio.sleep(0)
    assert call.router.cancelled == ["r-0"]
    assert call.answer.finished is not None
    assert call.answer.finished[0] == Usage(prompt_tokens=3, output_tokens=1)
    assert call.counted("content_filter") == 1
    assert len(call.ended) == 1


async def test_other_choices_go_on_after_one_that_is_ended_here() -> None:
    call = Call(prompts=2, n=2)
    call.answer.ends = {1}
    first, second = call.streams
    first.emit("bad", index=1)
    await asyncio.sleep(0)
    assert call.router.cancelled == []
    first.emit("fine", index=0, finish=FinishReason.STOP)
    await asyncio.sleep(0)
    assert call.router.cancelled == ["r-0"], "its worker would go on with the choice that was ended"
    call.answer.ends = {3}
    second.emit("fine", index=0, finish=FinishReason.STOP)
    second.emit("bad", index=1)
    assert call.answer.finished is None
    await asyncio.sleep(0)
    assert call.router.cancelled == ["r-0", "r-1"]
    assert call.answer.finished is not None
    assert call.answer.finished[0].output_tokens == 4


async def test_a_leg_that_ends_in_the_same_turn_is_not_cancelled() -> None:
    call = Call()
    call.answer.ends = {0}
    call.streams[0].emit("bad", finish=FinishReason.STOP)
    call.streams[0].finish()
    await asyncio.sleep(0)
    assert call.router.cancelled == []
    assert call.counted("ok") == 1
    assert len(call.ended) == 1


async def test_a_call_that_is_gone_after_its_end_ends_once() -> None:
    call = Call(prompts=2)
    call.generation.abandon(KvasirError("stopping"))
    call.exchange.on_gone = call.generation.gone
    call.exchange.gone("client_closed")
    await asyncio.sleep(0)
    assert len(call.ended) == 1
    assert sorted(call.router.cancelled) == ["r-0", "r-1"]


@pytest.mark.parametrize("how", ["finished", "failed", "gone", "filtered"])
async def test_the_spans_of_a_call_are_written_once_with_all_its_prompts(how: str) -> None:
    exporter = InMemorySpanExporter()
    spans = SpanRecorder(SimpleSpanProcessor(exporter), "kvasir")
    call = Call(prompts=2, spans=spans)
    first, second = call.streams
    first.emit("a")
    first.finish()
    assert exporter.get_finished_spans() == ()
    if how == "finished":
        second.finish()
    elif how == "failed":
        second.fail(UpstreamError("gone"))
    elif how == "gone":
        call.exchange.gone("client_closed")
    else:
        call.answer.ends = {1}
        second.emit("bad")
    await asyncio.sleep(0)
    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("request") == 1
    assert names.count("prompt") == 2
    spans.close()


def test_server_timing_names_each_part_that_there_was() -> None:
    summary = RequestSummary(
        "r",
        "m",
        "ok",
        arrival_s=1.0,
        finished_s=3.0,
        routed_s=1.2,
        prefill_done_s=1.5,
        first_token_s=1.75,
        transfer_s=0.125,
        route_s=0.001,
        tier_s=0.0625,
        usage=Usage(tier_tokens=64, transferred_bytes=4096),
    )
    assert server_timing(summary, 1.1).decode() == (
        "server-timing: admit;dur=100.00, queue;dur=100.00, route;dur=1.00, prefill;dur=300.00, "
        'tier;dur=62.50;desc="64 tokens", transfer;dur=125.00;desc="4096 bytes", ttft;dur=750.00, '
        "decode;dur=1250.00, total;dur=2000.00\r\n"
    )
