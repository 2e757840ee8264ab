"""The worker's gRPC server for routers, which also answers health checks.

It handles connections, not sessions: each connection that has sent Hello is passed to `on_connection`, and
ends when that returns. Snapshots are large, and have calls of their own that delay no session's tokens.

With TLS, a caller without a certificate of this deployment's authorities cannot make a call, and a caller
whose certificate is not a router's gets neither a session nor a snapshot. Each handshake uses the newest
certificates; existing connections are kept.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvasir.core.errors import CapacityError, ConfigError, ProtocolError
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.ports.session import ConnectionLost, WorkerConnection
from kvasir.wire.codec import (
    SERVICE,
    decode_snapshot_request,
    decode_to_worker,
    encode_snapshot_part,
    encode_to_router,
)
from kvasir.wire.tls import KeyMaterial, TlsFiles
from kvasir_workers.server.kv_feed import TOO_MANY_SNAPSHOTS

OnConnection = Callable[[WorkerConnection], Coroutine[Any, Any, None]]
Snapshots = Callable[[], AsyncGenerator[KvSnapshotPart, None]]
Context = grpc.aio.ServicerContext[bytes, bytes]

_MAX_PROBES = 16
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


@dataclass(frozen=True, slots=True)
class GrpcServerLimits:
    """Bounds of one server. A peer that does not answer a keepalive ping within `keepalive_timeout_s` is
    disconnected, as is one that does not send Hello within `hello_timeout_s`, or does not read a whole
    snapshot within `snapshot_timeout_s`."""

    max_message_bytes: int = 96 << 20
    max_concurrent_rpcs: int = 256
    hello_timeout_s: float = 5.0
    snapshot_timeout_s: float = 60.0
    keepalive_s: float = 2.0
    keepalive_timeout_s: float = 2.0
    min_ping_s: float = 0.5
    """Routers that ping more often than this are disconnected; gRPC's default of five minutes would
    disconnect ours."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The worker's certificate, and the URI that a router's certificate must have."""

    files: TlsFiles
    router: str


class GrpcWorkerConnection:
    """`kvasir.ports.session.WorkerConnection` over one RPC."""

    def __init__(self, context: Context, hello: Hello) -> None:
        self._context = context
        self._hello = hello
        self._reading: asyncio.Future[Any] | None = None
        self._ended = asyncio.Event()
        self._reason = "closed"
        self.refusal: str | None = None

    @property
    def hello(self) -> Hello:
        return self._hello

    async def accept(self, welcome: Welcome) -> None:
        await self._write(encode_to_router(welcome))

    async def refuse(self, reason: str) -> None:
        self.refusal = reason
        self.end(reason)

    async def send(self, frame: WorkerFrame) -> None:
        await self._write(encode_to_router(frame))

    async def receive(self) -> RouterFrame:
        if self._ended.is_set():
            raise ConnectionLost(self._reason)
        self._reading = asyncio.ensure_future(self._context.read())
        try:
            data = await self._reading
        except _BROKEN as error:
            raise ConnectionLost(str(error)) from error
        except asyncio.CancelledError:
            self._raise_unless_cancelled()
        finally:
            self._reading.cancel()
        if not isinstance(data, bytes):
            raise ConnectionLost("the router ended the stream")
        message = decode_to_worker(data)
        if not isinstance(message, RouterFrame):
            raise ProtocolError("a second Hello on one connection")
        return message

    async def close(self) -> None:
        self.end("closed")

    def end(self, reason: str) -> None:
        """Raise ConnectionLost in all that waits on this connection. Idempotent."""
        if not self._ended.is_set():
            self._reason = reason
            self._ended.set()
            if self._reading is not None:
                self._reading.cancel()

    async def wait_ended(self) -> None:
        """Return when this end has closed or refused, or the RPC broke."""
        await self._ended.wait()

    async def _write(self, data: bytes) -> None:
        if self._ended.is_set():
            raise ConnectionLost(self._reason)
        try:
            await self._context.write(data)
        except _BROKEN as error:
            raise ConnectionLost(str(error)) from error
        except asyncio.CancelledError:
            self._raise_unless_cancelled()

    def _raise_unless_cancelled(self) -> NoReturn:
        # gRPC also reports a dead RPC as CancelledError; only a cancelled task may re-raise it.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # noqa: PLE0704 - called from an except block only
        raise ConnectionLost(self._reason) from None


class GrpcServer:
    """One listening address. All methods run on one event loop.

    `token` is the deployment's session secret, or None; sessions and snapshots without it end with
    UNAUTHENTICATED. With `tls`, callers that are no routers of this deployment end with PERMISSION_DENIED,
    and callers without a certificate fail the handshake; None is plain text. Health checks need no token;
    `health_bind` also answers them in plain text, for probes without a certificate. `snapshot` begins a
    snapshot, as kvasir_workers.server.kv_feed.KvFeed does.
    """

    def __init__(
        self,
        on_connection: OnConnection,
        *,
        bind: str,
        token: str | None,
        snapshot: Snapshots | None = None,
        tls: ServerTls | None = None,
        health_bind: str | None = None,
        limits: GrpcServerLimits | None = None,
    ) -> None:
        self._on_connection = on_connection
        self._begin_snapshot = snapshot
        self._bind = bind
        self._tls = tls
        self._health_bind = health_bind
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._limits = limits or GrpcServerLimits()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        self._servers: list[grpc.aio.Server] = []
        self._sessions: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Bind and listen; return the port, which the system chooses if `bind` ends with `:0`. Health checks
        do not report SERVING yet. Raise ConfigError if the address cannot be bound."""
        server = grpc.aio.server(
            options=self._options(), maximum_concurrent_rpcs=self._limits.max_concurrent_rpcs
        )
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE,
                    {
                        "Session": grpc.stream_stream_rpc_method_handler(self._session),
                        "Snapshot": grpc.unary_stream_rpc_method_handler(self._snapshot),
                    },
                ),
            )
        )
        port = self._listen(server, self._bind, "worker.host", self._tls)
        servers = [server]
        if self._health_bind is not None:
            probes = grpc.aio.server(options=self._options(), maximum_concurrent_rpcs=_MAX_PROBES)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, probes)
            self._listen(probes, self._health_bind, "worker.health_port", None)
            servers.append(probes)
        self._servers = servers
        for one in servers:
            await one.start()
        return port

    @staticmethod
    def _listen(server: grpc.aio.Server, bind: str, field: str, tls: ServerTls | None) -> int:
        try:
            if tls is None:
                return server.add_insecure_port(bind)
            return server.add_secure_port(bind, server_credentials(tls.files))
        except RuntimeError as error:
            raise ConfigError(
                f"{field}: cannot listen on {bind}: "
                "the address must be one of this machine, and the port free"
            ) from error

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of health checks, for the server and for the service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in (health.OVERALL_HEALTH, SERVICE):
            await self._health.set(service, status)

    async def follow(self, wait_failed: Callable[[], Awaitable[str]]) -> str:
        """Serve until the engine fails, then report it to health checks; return why it failed."""
        await self.set_serving(True)
        try:
            return await wait_failed()
        finally:
            await self.set_serving(False)

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let the open ones end within `grace_s` seconds, then close them.
        Idempotent."""
        if not self._servers:
            return
        servers, self._servers = self._servers, []
        await self._health.enter_graceful_shutdown()
        await asyncio.gather(*(server.stop(grace_s) for server in servers))
        for task in self._sessions:
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    def _options(self) -> list[tuple[str, int]]:
        limits = self._limits
        return [
            # Two workers on one port would share routers at random instead of failing.
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", limits.max_concurrent_rpcs),
            ("grpc.max_send_message_length", limits.max_message_bytes),
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.keepalive_time_ms", round(limits.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(limits.keepalive_timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", round(limits.min_ping_s * 1000)),
        ]

    async def _authenticate(self, context: Context) -> None:
        if self._tls is not None:
            uris = [value.decode(errors="replace") for value in context.auth_context().get("peer_uri", ())]
            if uris != [self._tls.router]:
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"the caller's certificate is of {', '.join(uris) or 'no identity'}, but only "
                    f"{self._tls.router} may call; give the router its own certificate",
                )
        if self._expected is None:
            return
        given = b""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                given = value if isinstance(value, bytes) else value.encode()
        if not hmac.compare_digest(given, self._expected):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the session token is missing or wrong")

    async def _hello(self, context: Context) -> Hello:
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                data = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello was received in time")
        try:
            message = decode_to_worker(data) if isinstance(data, bytes) else None
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        if not isinstance(message, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is not a Hello")
        return message

    async def _session(self, _requests: object, context: Context) -> None:
        await self._authenticate(context)
        connection = GrpcWorkerConnection(context, await self._hello(context))
        # Otherwise it would be sent with the first message, and an RPC that ends in the middle of that
        # message would try to send it again, fail inside gRPC, and leave its peer waiting forever.
        await context.send_initial_metadata(())
        # A separate task: gRPC cancels this one when the RPC breaks, and a session must not be cancelled by
        # its connection.
        session = asyncio.ensure_future(self._on_connection(connection))
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)
        ended = asyncio.ensure_future(connection.wait_ended())
        try:
            await asyncio.wait((session, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            connection.end("the connection broke")
        if connection.refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, connection.refusal)

    async def _snapshot(self, request: bytes, context: Context) -> None:
        await self._authenticate(context)
        if self._begin_snapshot is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server has no snapshots")
        try:
            decode_snapshot_request(request)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        try:
            async with (
                asyncio.timeout(self._limits.snapshot_timeout_s),
                aclosing(self._begin_snapshot()) as parts,
            ):
                async for part in parts:
                    await context.write(encode_snapshot_part(part))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, error.message)
        except CapacityError as error:
            exhausted = error.code == TOO_MANY_SNAPSHOTS
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if exhausted else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the snapshot was read too slowly")


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return certificates for each handshake, from the newest valid files. gRPC calls this on its own
    threads."""
    served = files.current()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        newest = files.current()
        if newest is served:
            return None
        served = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        newer,  # type: ignore[arg-type]  # None, for "as before", is missing from the stubs
        require_client_authentication=True,
    )


def _configuration(material: KeyMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.ca)
