"""One OpenTelemetry span tree per request, written when the request has ended.

The times come from the request's summary, so serving itself starts no span and pays nothing; without a
collector configured there is no recorder at all, and OpenTelemetry is not even imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvasir.ports.router import RequestSummary
from kvasir.telemetry.reasons import OK

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_NS = 1_000_000_000


class SpanRecorder:
    """Turns summaries into spans. `record` never blocks: exporting happens in the processor's thread."""

    def __init__(
        self, processor: SpanProcessor, service: str, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        # Imported here so that a process without tracing never loads the SDK.
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvasir")
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._wall_ns = wall_ns

    def record(self, summary: RequestSummary, *, now_s: float, admitted_s: float) -> None:
        """Write the spans of an ended request.

        `now_s` is the present reading of the clock that the summary's times are of; `admitted_s` the
        reading when the gateway handed the request to the router.
        """
        offset = self._wall_ns() - int(now_s * _NS)

        def wall(seconds: float) -> int:
            return offset + int(seconds * _NS)

        parent = self._propagator.extract({"traceparent": summary.trace_context})
        root = self._tracer.start_span(
            "request",
            parent,
            start_time=wall(summary.arrival_s),
            attributes={
                "kvasir.request_id": summary.request_id,
                "kvasir.model": summary.model,
                "kvasir.outcome": summary.outcome,
                "kvasir.prompt_tokens": summary.usage.prompt_tokens,
                "kvasir.cached_tokens": summary.usage.cached_tokens,
                "kvasir.output_tokens": summary.usage.output_tokens,
                "kvasir.retries": summary.retries,
                "kvasir.migrations": summary.migrations,
            },
        )
        if summary.outcome != OK:
            root.set_status(self._trace.StatusCode.ERROR, summary.outcome)
        context = self._trace.set_span_in_context(root)
        for name, start, end, attributes in _parts(summary, admitted_s):
            span = self._tracer.start_span(name, context, start_time=wall(start), attributes=attributes)
            span.end(wall(max(start, end)))
        root.end(wall(summary.finished_s))

    def close(self) -> None:
        """Flush what waits to be exported, within the exporter's own timeout."""
        self._provider.shutdown()


_Part = tuple[str, float, float, dict[str, str | int]]


def _parts(summary: RequestSummary, admitted_s: float) -> Iterator[_Part]:
    """The children of a request's span, as far as the request got: name, start, end, attributes."""
    yield "admit", summary.arrival_s, admitted_s, {}
    routed = summary.routed_s
    yield "queue", admitted_s, summary.finished_s if routed is None else routed, {}
    if routed is None:
        return
    yield (
        "route",
        routed,
        routed,
        {
            "kvasir.reason": summary.reason,
            "kvasir.prefill_worker": summary.prefill_worker or "",
            "kvasir.decode_worker": summary.decode_worker or "",
            "kvasir.predicted_cached_tokens": summary.predicted_cached_tokens,
        },
    )
    prefilled = summary.prefill_done_s
    yield "prefill", routed, summary.finished_s if prefilled is None else prefilled, {}
    if prefilled is None:
        return
    moved = prefilled + summary.transfer_s
    if summary.usage.transferred_bytes or summary.transfer_s:
        yield "transfer", prefilled, moved, {"kvasir.bytes": summary.usage.transferred_bytes}
    yield "decode", moved, summary.finished_s, {"kvasir.output_tokens": summary.usage.output_tokens}


def otlp_recorder(endpoint: str | None, service: str) -> SpanRecorder | None:
    """A recorder that exports to an OTLP collector over gRPC, or None when none is configured.

    `endpoint` is `host:port` or a URL; only `https://` is encrypted.
    """
    if endpoint is None:
        return None
    # Imported here for the same reason as in SpanRecorder.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    return SpanRecorder(BatchSpanProcessor(exporter), service)
