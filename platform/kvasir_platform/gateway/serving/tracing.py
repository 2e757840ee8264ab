"""W3C trace context at the edge. Only well-formed headers are accepted, since they travel to every worker.

Baggage is dropped: it belongs to the client, and would leave in the headers of every call that a worker
makes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvasir.telemetry.spans import UNTRACED, SpanRecorder, TraceContext

_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MEMBER = rb"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_TRACE_STATE = re.compile(rb"%b(?:[ \t]*,[ \t]*%b){0,31}" % (_MEMBER, _MEMBER))
_MAX_STATE_BYTES = 512


def trace_parent(header: bytes) -> str:
    """Return the `traceparent` header if it is valid, else ""."""
    if not _TRACE_PARENT.fullmatch(header) or header.startswith(b"ff"):
        return ""
    return header.decode("ascii")


def trace_state(header: bytes | None) -> str:
    """Return the `tracestate` header if it is valid and short enough, else ""."""
    if header is None or len(header) > _MAX_STATE_BYTES or not _TRACE_STATE.fullmatch(header):
        return ""
    return header.decode("ascii")


def trace_of(headers: Mapping[bytes, bytes], spans: SpanRecorder | None) -> TraceContext:
    """Return the trace context of a call with these headers. Without tracing here, the client's context is
    passed on unchanged. A tracestate without a traceparent is ignored."""
    header = headers.get(b"traceparent")
    if header is None:
        return UNTRACED if spans is None else spans.begin()
    parent = trace_parent(header)
    state = trace_state(headers.get(b"tracestate")) if parent else ""
    if spans is None:
        return TraceContext.of(parent, state) if parent else UNTRACED
    return spans.begin(parent, state)


def trace_header(trace: TraceContext) -> bytes:
    """Return the response header that names the span of the call; empty without tracing."""
    return b"traceparent: %b\r\n" % trace.own.encode("ascii") if trace.own else b""
