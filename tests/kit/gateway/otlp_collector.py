"""An OpenTelemetry collector that only listens: what a deployment tells a real one, over the same gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`address` is what it listens at; `spans` is all that it was sent, in the words of OTLP."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Any] = []

    def Export(self, request: Any, _context: Any) -> Any:
        """Take spans."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace: str) -> dict[str, Any]:
        """The spans of one trace by their names."""
        return {span.name: span for span in list(self.spans) if span.trace_id.hex() == trace}


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens on a free port of this machine."""
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
