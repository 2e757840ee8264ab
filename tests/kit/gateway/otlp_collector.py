"""An OpenTelemetry collector that records what a deployment exports, over the same gRPC as a real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as an OTLP message, and the attributes of the resource that sent it."""

    span: Any
    resource: Mapping[str, str]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens at `address`; `spans` are all received spans."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[ReceivedSpan] = []

    def Export(self, request: Any, _context: Any) -> Any:
        """Record the spans."""
        for each in request.resource_spans:
            sender = {part.key: part.value.string_value for part in each.resource.attributes}
            for scope in each.scope_spans:
                self.spans.extend(ReceivedSpan(span, sender) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def received_in(self, trace: str) -> list[ReceivedSpan]:
        """The spans of one trace, of each process in the order in which it sent them."""
        return [each for each in list(self.spans) if each.span.trace_id.hex() == trace]

    def of_trace(self, trace: str) -> dict[str, Any]:
        """The OTLP messages of one trace by name."""
        return {each.span.name: each.span for each in self.received_in(trace)}


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    made = Collector()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
        made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield made
        finally:
            server.stop(None).wait()
