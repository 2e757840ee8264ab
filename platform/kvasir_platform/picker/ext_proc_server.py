"""The gRPC server of an endpoint picker: external processing, and health checks as the protocol names
them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvasir.core.errors import ConfigError
from kvasir.core.membership import host_port
from kvasir.wire.ext_proc import ext_proc_pb2 as ext
from kvasir_platform.picker.endpoints import EndpointPicker
from kvasir_platform.picker.ext_proc_stream import ExtProcStream

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Bounds of one server. Requests above `max_streams` are refused with RESOURCE_EXHAUSTED, which gateways
    treat as an unavailable picker."""

    max_streams: int = 4096
    max_body_bytes: int = 8 << 20
    max_message_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's certificate chain and private key, in PEM."""

    certificate: bytes
    key: bytes


class ExtProcServer:
    """Serves `picker`. `now` is its clock. Create and use it on one event loop."""

    def __init__(
        self,
        picker: EndpointPicker,
        now: Callable[[], float],
        *,
        bounds: ServerBounds | None = None,
        keys: ServerKeys | None = None,
        test_headers: bool = False,
    ) -> None:
        self._picker = picker
        self._now = now
        self._bounds = bounds or ServerBounds()
        self._keys = keys
        self._test_headers = test_headers
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its types
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._bounds.max_message_bytes),
                ("grpc.max_send_message_length", self._bounds.max_message_bytes),
            ],
            maximum_concurrent_rpcs=self._bounds.max_streams,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raise ConfigError if the address is taken or the certificate
        invalid."""
        handlers = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        address = host_port(host, port)
        try:
            if self._keys is None:
                bound = self._server.add_insecure_port(address)
            else:
                pair = (self._keys.key, self._keys.certificate)
                bound = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise ConfigError(f"picker: cannot listen on {address}: {error}; choose another port") from error
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(ready=False)
        await self._server.start()
        return bound

    async def set_ready(self, *, ready: bool) -> None:
        """Say whether requests should come: once the members of the pool are known."""
        state = health_pb2.HealthCheckResponse
        for name in ("", READINESS, SERVICE):
            await self._health.set(name, state.SERVING if ready else state.NOT_SERVING)

    async def stop(self) -> None:
        """Take no more requests, and wait shortly for those that are in flight."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(_STOP_S)

    async def _process(self, messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        stream = ExtProcStream(
            self._picker,
            self._now,
            max_body_bytes=self._bounds.max_body_bytes,
            test_headers=self._test_headers,
        )
        try:
            async for message in messages:
                for response in stream.handle(ext.ProcessingRequest.FromString(message)):
                    yield response.SerializeToString()
        finally:
            stream.close()
