"""Telemetry of one request: its tree of spans, and its metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.kit.gateway.otlp_collector import collector
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.config.spec.edge import TelemetrySpec
from kvasir.core.errors import CapacityError
from kvasir.core.requests import EngineLoad
from kvasir.ports.router import WorkerView
from kvasir.telemetry.spans import SpanRecorder, otlp_recorder

BODY = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}],"stream":true}'
CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"traceparent: 00-{TRACE}-{SPAN}-01\r\n"


def apart(stream: ScriptedStream) -> None:
    """Three tokens, after a transfer."""
    for text in "abc":
        stream.emit(text)
    stream.finish(cached=2, moved_bytes=4096, transfer_s=0.004)


def recorder() -> tuple[InMemorySpanExporter, SpanRecorder]:
    exporter = InMemorySpanExporter()
    return exporter, SpanRecorder(SimpleSpanProcessor(exporter), "kvasir")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of every span that is made in this process, by whomever."""
    names: list[str] = []
    make = ReadableSpan.__init__

    def counted(span: ReadableSpan, name: str, *args: Any, **options: Any) -> None:
        names.append(name)
        make(span, name, *args, **options)

    monkeypatch.setattr(ReadableSpan, "__init__", counted)
    return names


async def test_a_request_is_one_tree_of_spans_under_the_clients(start: Any, made: list[str]) -> None:
    exporter, spans = recorder()
    edge = await start(spans=spans)
    edge.router.script = apart
    assert (await edge.post(CHAT, BODY, PARENT)).status == 200
    parts = list(exporter.get_finished_spans())
    root = parts.pop()
    assert root.name == "request"
    assert root.attributes is not None
    assert root.attributes["kvasir.outcome"] == "ok"
    assert root.context is not None
    assert root.parent is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert [span.name for span in parts] == ["admit", "queue", "route", "prefill", "transfer", "decode"]
    assert {span.parent.span_id for span in parts if span.parent} == {root.context.span_id}
    assert {f"{span.context.trace_id:032x}" for span in parts if span.context} == {TRACE}
    assert len(made) == 7


async def test_client_and_workers_are_told_of_the_span_of_their_call(start: Any) -> None:
    exporter, spans = recorder()
    edge = await start(spans=spans)
    edge.router.script = apart
    for body in (BODY, BODY.replace(b"true", b"false")):
        exporter.clear()
        reply = await edge.post(CHAT, body, PARENT + "tracestate: a=1\r\nbaggage: user=me\r\n")
        root = exporter.get_finished_spans()[-1]
        assert root.context is not None
        own = f"00-{TRACE}-{root.context.span_id:016x}-01"
        assert reply.headers["traceparent"] == own
        assert edge.router.streams[-1].request.trace_context == f"{own} a=1"


async def test_a_request_without_a_trace_begins_its_own(start: Any) -> None:
    exporter, spans = recorder()
    edge = await start(spans=spans)
    edge.router.script = apart
    await edge.post(CHAT, BODY)
    await edge.post(CHAT, BODY, "traceparent: 00-not-a-trace-01\r\n")
    roots = [span for span in exporter.get_finished_spans() if span.name == "request"]
    assert [span.parent for span in roots] == [None, None]
    assert len({span.context.trace_id for span in roots if span.context}) == 2


async def test_a_failed_request_has_its_spans_too(start: Any) -> None:
    exporter, spans = recorder()
    edge = await start(spans=spans)
    edge.router.script = lambda stream: stream.fail(CapacityError("full"))
    await edge.post(CHAT, BODY)
    (root,) = [span for span in exporter.get_finished_spans() if span.name == "request"]
    assert root.attributes is not None
    assert root.attributes["kvasir.outcome"] == "no_capacity"
    assert not root.status.is_ok


async def test_a_collector_gets_the_calls_that_fail_and_no_others_under_tail_sampling(start: Any) -> None:
    with collector() as receiver:
        spans = otlp_recorder(receiver.address, "kvasir", share=0.0)
        assert spans is not None
        edge = await start(spans=spans)
        edge.router.script = apart
        well = await edge.post(CHAT, BODY)
        edge.router.script = lambda stream: stream.fail(CapacityError("full"))
        failed = await edge.post(CHAT, BODY)
        await asyncio.to_thread(spans.close)
        assert well.headers["traceparent"].endswith("-00")
        assert receiver.of_trace(well.headers["traceparent"][3:35]) == {}
        found = receiver.of_trace(failed.headers["traceparent"][3:35])
        assert {"request", "admit", "queue"} <= set(found)
        assert found["request"].span_id.hex() == failed.headers["traceparent"][36:52]
    assert edge.router.streams[-1].request.trace_context == f"{failed.headers['traceparent']} kvasir=tail"


async def test_exemplars_are_shown_to_those_who_ask_for_openmetrics(start: Any) -> None:
    _, spans = recorder()
    edge = await start(spans=spans, deployed={"telemetry": TelemetrySpec(exemplars=True)})
    edge.router.script = apart
    await edge.post(CHAT, BODY, PARENT)
    asked = "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n"
    shown = await edge.get("/metrics", asked)
    assert shown.headers["content-type"].startswith("application/openmetrics-text")
    assert f'# {{trace_id="{TRACE}"}}' in shown.body.decode()
    assert shown.body.endswith(b"# EOF\n")
    plain = await edge.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert TRACE not in plain.body.decode()


async def test_without_a_collector_no_span_is_made(edge: Any, made: list[str]) -> None:
    edge.router.script = apart
    assert (await edge.post(CHAT, BODY, PARENT)).status == 200
    assert edge.router.streams[0].request.trace_context, "the client's trace still travels to the workers"
    assert made == []


async def test_metrics_show_the_queue_and_what_each_worker_found_and_received(edge: Any) -> None:
    edge.router.script = apart
    load = EngineLoad(prefix_queries_tokens=96, prefix_hits_tokens=64, transfer_bytes_received=4096)
    edge.router.views = [
        WorkerView("p-0", "a", "prefill", "ready", load=EngineLoad()),
        WorkerView("d-0", "b", "decode", "ready", load=load),
    ]
    await edge.post(CHAT, BODY)
    shown = (await edge.get("/metrics")).body.decode()
    assert 'kvasir_queue_seconds_count{model="kvasir-tiny"} 1.0' in shown
    assert 'kvasir_queue_seconds_bucket{le="+Inf",model="kvasir-tiny"} 1.0' in shown
    assert 'kvasir_transfer_seconds_count{model="kvasir-tiny"} 1.0' in shown
    assert 'kvasir_transferred_bytes_total{model="kvasir-tiny"} 4096.0' in shown
    for pool, worker, hits, received in (("decode", "d-0", 64, 4096), ("prefill", "p-0", 0, 0)):
        labels = f'{{pool="{pool}",worker="{worker}"}}'
        assert f"kvasir_worker_prefix_hits_tokens_total{labels} {hits}.0" in shown
        assert f"kvasir_worker_transfer_received_bytes_total{labels} {received}.0" in shown
