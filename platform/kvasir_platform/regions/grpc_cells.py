"""Links between cells over gRPC, one bidirectional stream each, with the certificates of routers.

gRPC gives Python no access to the server's certificate, but checks one name in it: the DNS name of the other
deployment's routers, whatever its address. The server reads the caller's URI, and accepts routers of the
peers that the spec names, and nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from kvasir.core.errors import ConfigError, ProtocolError
from kvasir.ports.session import ConnectionLost
from kvasir.wire.tls import TlsFiles, TlsNames
from kvasir_platform.regions.connections import CellConnection, OnCell
from kvasir_platform.regions.frames import MAX_MESSAGE_BYTES
from kvasir_workers.server.grpc_server import server_credentials

T = TypeVar("T")
Context = grpc.aio.ServicerContext[bytes, bytes]

SERVICE, METHOD = "kvasir.regions.v1.Cells", "Link"
_MAX_LINKS = 256
_KEEPALIVE_MS = 2000
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
_REFUSALS = frozenset({grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED})


@dataclass(frozen=True, slots=True)
class CellTls:
    """The certificate of this cell's router, and the trust domain that all cells share."""

    files: TlsFiles
    trust_domain: str

    def names(self, deployment: str) -> TlsNames:
        """Return the names in certificates of a deployment."""
        return TlsNames(self.trust_domain, deployment)


async def _guarded(operation: Awaitable[T], reason: str) -> T:
    """Await an operation of gRPC; raise ConnectionLost where it reports a broken RPC, also as a
    cancellation."""
    try:
        return await operation
    except _BROKEN as error:
        raise ConnectionLost(str(error) or reason) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionLost(reason) from None


class GrpcCellLink:
    """`CellConnection` of the side that connects."""

    def __init__(self, channel: grpc.aio.Channel, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self._channel = channel
        self._call = call

    async def send(self, data: bytes) -> None:
        """See CellConnection."""
        await _guarded(self._call.write(data), "the cell ended the link")

    async def receive(self) -> bytes:
        """See CellConnection. Raise ProtocolError if the cell refuses this one."""
        try:
            data = await _guarded(self._call.read(), "the cell ended the link")
        except ConnectionLost as lost:
            await self._raise_ended(lost)
        if not isinstance(data, bytes):
            await self._raise_ended(ConnectionLost("the cell ended the link"))
        return data

    async def close(self) -> None:
        """See CellConnection."""
        self._call.cancel()
        await self._channel.close(None)

    async def _raise_ended(self, lost: ConnectionLost) -> NoReturn:
        if self._call.done():
            code, details = await self._call.code(), await self._call.details()
            if code in _REFUSALS:
                raise ProtocolError(f"the cell refused: {details}", code="cell_refused") from lost
            raise ConnectionLost(f"{code.name}: {details}") from lost
        # Raised again here, the same error would be in a cycle with this frame, and keep its connection open.
        raise ConnectionLost(str(lost)) from lost


class GrpcCellDialer:
    """Dials the routers of another cell at `address`, whose certificate must be of `deployment`. Without
    `tls` it uses plain text."""

    def __init__(
        self, address: str, deployment: str, tls: CellTls | None, *, connect_timeout_s: float = 2.0
    ) -> None:
        self._address = address
        self._deployment = deployment
        self._tls = tls
        self._timeout_s = connect_timeout_s

    async def dial(self) -> CellConnection:
        """See CellDialer."""
        channel = self._channel()
        try:
            async with asyncio.timeout(self._timeout_s):
                await channel.channel_ready()
        except TimeoutError as error:
            await channel.close(None)
            raise ConnectionLost(
                f"no connection to {self._address} in {self._timeout_s:g} s: it is not reachable, or has no "
                f"certificate of a router of {self._deployment}"
            ) from error
        except BaseException:
            await channel.close(None)
            raise
        method = channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=None, response_deserializer=None
        )
        return GrpcCellLink(channel, method(None, wait_for_ready=False))

    def _channel(self) -> grpc.aio.Channel:
        options: list[tuple[str, int | str]] = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_reconnect_backoff_ms", 500),
            *_bounds(),
        ]
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        if problem := self._tls.files.invalid():
            raise ProtocolError(f"this router cannot prove its identity: {problem}", code="cell_refused")
        own = self._tls.files.current()
        options.append(("grpc.ssl_target_name_override", self._tls.names(self._deployment).router_dns))
        credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.chain)
        return grpc.aio.secure_channel(self._address, credentials, options=options)


class _ServedLink:
    """`CellConnection` of the side that listens."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._reading: asyncio.Future[Any] | None = None
        self._closed = False

    async def send(self, data: bytes) -> None:
        if self._closed:
            raise ConnectionLost("closed")
        await _guarded(self._context.write(data), "the cell ended the link")

    async def receive(self) -> bytes:
        if self._closed:
            raise ConnectionLost("closed")
        self._reading = asyncio.ensure_future(self._context.read())
        try:
            data = await _guarded(self._reading, "the cell ended the link")
        finally:
            self._reading.cancel()
        if not isinstance(data, bytes):
            raise ConnectionLost("the cell ended the link")
        return data

    async def close(self) -> None:
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()


class GrpcCellServer:
    """Listens for the routers of other cells, whose deployments are `peers`. `on_cell` serves each link.
    Without `tls`, callers prove nothing: only for loopback."""

    def __init__(self, on_cell: OnCell, *, bind: str, peers: Iterable[str], tls: CellTls | None) -> None:
        self._on_cell = on_cell
        self._bind = bind
        self._tls = tls
        self._deployments = {} if tls is None else {tls.names(name).router: name for name in peers}
        self._server: grpc.aio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Bind and listen; return the port. Raise ConfigError if the address cannot be bound."""
        server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), *_bounds()], maximum_concurrent_rpcs=_MAX_LINKS
        )
        handler = grpc.stream_stream_rpc_method_handler(self._link)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            if self._tls is None:
                port = server.add_insecure_port(self._bind)
            else:
                port = server.add_secure_port(self._bind, server_credentials(self._tls.files))
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(
                f"regions.listen: cannot listen on {self._bind}: the address must be one of this machine, "
                "and the port free"
            ) from error
        self._server = server
        await server.start()
        return port

    async def stop(self) -> None:
        """End all links. Idempotent."""
        for task in self._links:
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def _link(self, _requests: object, context: Context) -> None:
        deployment = await self._identified(context)
        link = _ServedLink(context)
        # Otherwise an RPC that ends in the middle of its first message leaves its peer waiting for it.
        await context.send_initial_metadata(())
        # gRPC cancels this task when the RPC breaks, and what serves the link must end in order.
        serving = asyncio.ensure_future(self._on_cell(link, deployment))
        self._links.add(serving)
        serving.add_done_callback(self._links.discard)
        try:
            await asyncio.wait((serving,))
        finally:
            await link.close()
        if isinstance(error := serving.exception(), ProtocolError):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.message)

    async def _identified(self, context: Context) -> str | None:
        """Return the deployment of the caller; end the call of anybody else."""
        if self._tls is None:
            return None
        uris = [each.decode(errors="replace") for each in context.auth_context().get("peer_uri", ())]
        found = self._deployments.get(uris[0]) if len(uris) == 1 else None
        if found is None:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the caller's certificate is of {', '.join(uris) or 'no identity'}, and regions.peers names "
                "no such deployment",
            )
        return found


def _bounds() -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 4),
    ]
