"""W3C trace context at the edge: taken only when well formed, since it travels to every worker.

Baggage is not taken: it is the client's own, and would leave in the headers of whatever a worker calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvasir.telemetry.spans import SpanRecorder, TraceContext

_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MEMBER = rb"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACE_STATE = re.compile(rb"%b(?:[ \t]*,[ \t]*%b){0,31}" % (_MEMBER, _MEMBER))
_MAX_STATE_BYTES = 512


def trace_parent(header: bytes | None) -> str:
    """The `traceparent` header if it is valid, else ""."""
    if header is None or not _TRACE_PARENT.fullmatch(header) or header.startswith(b"ff"):
        return ""
    return header.decode("ascii")


def trace_state(header: bytes | None) -> str:
    """The `tracestate` header if it is valid and short enough, else ""."""
    if header is None or len(header) > _MAX_STATE_BYTES or not _TRACE_STATE.fullmatch(header):
        return ""
    return header.decode("ascii")


def trace_of(headers: Mapping[bytes, bytes], spans: SpanRecorder | None) -> TraceContext:
    """The trace context of a call with these headers: the client's goes on as it is where nothing is traced
    here. A tracestate without a traceparent means nothing."""
    parent = trace_parent(headers.get(b"traceparent"))
    state = trace_state(headers.get(b"tracestate")) if parent else ""
    return TraceContext(parent, state) if spans is None else spans.begin(parent, state)


def trace_header(trace: TraceContext) -> bytes:
    """The line by which an answer names the span of its call; empty where nothing is traced."""
    return b"traceparent: %b\r\n" % trace.own.encode("ascii") if trace.own else b""
