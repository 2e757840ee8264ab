"""Spans that have ended, as OpenTelemetry's SDK has them."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvasir.ports.clock import Rng
from kvasir.telemetry.spans import Attributes


class EndedSpans:
    """Passes spans of this process, described by `resource`, to `processor`.

    All that is known of a span is known when it is made. The SDK's tracer makes spans that are still to end,
    each with a lock, limits and the decision of a sampler, which takes ten times as long."""

    def __init__(self, processor: SpanProcessor, resource: Mapping[str, str], rng: Rng) -> None:
        self._processor = processor
        self._rng = rng
        described = Resource.create(resource)
        number = hash(described)

        class HashedResource(Resource):
            """A library's exporter asks for the hash of each span's resource, for which the SDK would write
            the attributes as JSON every time."""

            def __hash__(self) -> int:
                return number

        self._resource = HashedResource(described.attributes, described.schema_url)
        self._scope = InstrumentationScope("kvasir")
        self._propagator = TraceContextTextMapPropagator()
        self._sampled = TraceFlags(TraceFlags.SAMPLED)

    def parent(self, traceparent: str, tracestate: str) -> SpanContext:
        """Return the span of another process that these headers name."""
        carrier = {"traceparent": traceparent, "tracestate": tracestate}
        return trace.get_current_span(self._propagator.extract(carrier)).get_span_context()

    def context(self, trace_id: int, span_id: int, parent: SpanContext | None) -> SpanContext:
        """Return a span of this process, with the tracestate of its parent."""
        state = None if parent is None else parent.trace_state
        return SpanContext(trace_id, span_id, False, self._sampled, state)

    def child(self, parent: SpanContext) -> SpanContext:
        """Return a new span below another."""
        return self.context(parent.trace_id, self._rng.getrandbits(64) or 1, parent)

    def add(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[int, int],
        attributes: Attributes,
        *,
        serves: bool = False,
        error: str | None = None,
    ) -> None:
        """Record a span that lasted between two Unix times in nanoseconds. `serves`: it answers another
        process. Without an `error` its status is not set."""
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                attributes,
                kind=SpanKind.SERVER if serves else SpanKind.INTERNAL,
                status=Status() if error is None else Status(StatusCode.ERROR, error),
                start_time=times[0],
                end_time=times[1],
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Export pending spans, within the timeout of the exporter."""
        self._processor.shutdown()
