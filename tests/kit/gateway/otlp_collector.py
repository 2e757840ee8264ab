"""An OpenTelemetry collector that records what a deployment exports, over the same gRPC as a real one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens at `address`; `spans` are all received spans, as OTLP messages."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Any] = []

    def Export(self, request: Any, _context: Any) -> Any:
        """Record the spans."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace: str) -> dict[str, Any]:
        """The spans of one trace by name."""
        return {span.name: span for span in list(self.spans) if span.trace_id.hex() == trace}


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
