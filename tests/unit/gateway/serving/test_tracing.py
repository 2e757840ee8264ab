"""Trace context crosses the edge in both directions; malformed context does not."""

from __future__ import annotations

import random

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvasir.telemetry.spans import SpanRecorder, TraceContext
from kvasir_platform.gateway.serving.tracing import trace_header, trace_of, trace_state

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def headers(**values: str) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in values.items()}


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("congo=t61rcWkgMzE", True),
        ("a=1, b=2,c=3", True),
        ("tenant@vendor=x y", True),
        ("", False),
        ("a", False),
        ("A=1", False),
        ("a=1,", False),
        ("a=1\x01", False),
        ("a=" + "x" * 600, False),
        (",".join(f"k{i}=1" for i in range(33)), False),
    ],
)
def test_only_a_well_formed_trace_state_goes_on(state: str, kept: bool) -> None:
    assert trace_state(state.encode()) == (state if kept else "")


def test_without_a_recorder_the_clients_context_goes_on_and_the_answer_names_none() -> None:
    trace = trace_of(headers(traceparent=PARENT, tracestate="a=1", baggage="user=me"), None)
    assert trace.onward == f"{PARENT} a=1"
    assert trace_header(trace) == b""


@pytest.mark.parametrize("parent", ["", "00-0-0-01"])
def test_a_state_without_a_parent_means_nothing(parent: str) -> None:
    assert trace_of(headers(traceparent=parent, tracestate="a=1"), None) == TraceContext()


def test_with_a_recorder_workers_and_client_are_told_of_the_calls_own_span() -> None:
    spans = SpanRecorder(SimpleSpanProcessor(InMemorySpanExporter()), "kvasir", rng=random.Random(1))
    under, alone = trace_of(headers(traceparent=PARENT), spans), trace_of({}, spans)
    assert under.own[:36] == PARENT[:36]
    assert under.own != PARENT
    assert under.onward == under.own
    assert trace_header(under) == f"traceparent: {under.own}\r\n".encode()
    assert alone.own[3:35] not in (PARENT[3:35], "0" * 32)
    spans.close()
