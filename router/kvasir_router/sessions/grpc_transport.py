"""Connections to workers over gRPC: `kvasir.ports.session.Dialer` for production.

Each connection has a channel of its own, closed with it: a shared channel would pass its back-off and its
broken state to the next attempt, and the session controls reconnects. Each connection also does its own TLS
handshake, with the certificates on disk at that moment.

gRPC gives Python no access to the server's certificate, but it checks one name in it. A worker's DNS name
therefore encodes deployment and pool, whatever its address: a connection exists only if both are proven.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from kvasir.core.errors import ProtocolError
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.ports.session import ConnectionLost
from kvasir.wire.codec import (
    SERVICE,
    decode_snapshot_part,
    decode_to_router,
    encode_snapshot_request,
    encode_to_worker,
)
from kvasir.wire.tls import TlsFiles, TlsNames

T = TypeVar("T")
Call = grpc.aio.StreamStreamCall[bytes, bytes]

WRONG_IDENTITY = "wrong_identity"
UNTRUSTED = "untrusted_certificate"

_VERIFY_FAILED = re.compile(r"CERTIFICATE_VERIFY_FAILED: (.+?)(?:: OK)?$")
_NO_REASON = "Internal error from Core"
"""gRPC's details of a call that ended while a message was sent. They replace the worker's, which may have
refused the call."""
_DIALS = 3
"""Attempts to learn why a worker ends a call."""
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
_REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class GrpcDialLimits:
    """`connect_timeout_s` covers the whole dial including Welcome, and `part_timeout_s` each part of a
    snapshot. A peer that does not answer a keepalive ping within `keepalive_timeout_s` is disconnected."""

    connect_timeout_s: float = 1.0
    part_timeout_s: float = 5.0
    max_message_bytes: int = 96 << 20
    keepalive_s: float = 2.0
    keepalive_timeout_s: float = 2.0


@dataclass(frozen=True, slots=True)
class DialTls:
    """The certificates of the router, and the name that a worker of `pool` must prove."""

    files: TlsFiles
    names: TlsNames
    pool: str

    @property
    def expected(self) -> str:
        """The name in the worker's certificate."""
        return self.names.worker_dns(self.pool)


class GrpcRouterConnection:
    """`kvasir.ports.session.RouterConnection` over one RPC on its own channel."""

    def __init__(self, channel: grpc.aio.Channel, call: Call) -> None:
        self._channel = channel
        self._call = call
        self._welcome: Welcome | None = None

    @property
    def welcome(self) -> Welcome:
        if self._welcome is None:
            raise ConnectionLost("the worker has not answered")
        return self._welcome

    async def handshake(self, hello: Hello) -> None:
        """Exchange Hello and Welcome. Raises ConnectionLost, or ProtocolError for a refusal."""
        await self._guard(self._call.write(encode_to_worker(hello)))
        answer = await self._read()
        if not isinstance(answer, Welcome):
            raise ProtocolError("the worker did not answer the Hello with a Welcome")
        self._welcome = answer

    async def send(self, frame: RouterFrame) -> None:
        await self._guard(self._call.write(encode_to_worker(frame)))

    async def receive(self) -> WorkerFrame:
        message = await self._read()
        if not isinstance(message, WorkerFrame):
            raise ProtocolError("a second Welcome on one connection")
        return message

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)

    async def _read(self) -> Welcome | WorkerFrame:
        data = await self._guard(self._call.read())
        if not isinstance(data, bytes):
            raise ConnectionLost("the worker ended the stream")
        return decode_to_router(data)

    async def _guard(self, operation: Awaitable[T]) -> T:
        try:
            return await operation
        except _BROKEN as error:
            await self._raise_lost(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # `close` cancels the call, which raises this too; only a cancelled task may propagate it.
            if task is not None and task.cancelling():
                raise
            raise ConnectionLost("closed") from None

    async def _raise_lost(self, error: BaseException) -> NoReturn:
        raise await _ended(self._call, error) from error


async def _ended(
    call: Call | grpc.aio.UnaryStreamCall[bytes, bytes], error: BaseException
) -> ConnectionLost | ProtocolError:
    """Return the error of a broken call."""
    if not call.done():
        return ConnectionLost(str(error))
    code, details = await call.code(), await call.details()
    if code in _REFUSALS:
        return ProtocolError(f"the worker refused: {details}", code=code.name.lower())
    return ConnectionLost(f"{code.name}: {details}")


def _handshake_failure(said: str, address: str, tls: DialTls) -> ConnectionLost | ProtocolError:
    """Return the refusal that gRPC's text about the TLS handshake means, or a loss."""
    if "Hostname Verification Check failed" in said:
        return ProtocolError(
            f"{address} has no certificate of {tls.expected}, but one of another pool, deployment or trust "
            "domain, or a router's; correct discovery, or issue that worker's certificate again",
            code=WRONG_IDENTITY,
        )
    if failure := _VERIFY_FAILED.search(said):
        return ProtocolError(
            f"the certificate of the worker at {address} is not accepted: {failure[1]}; renew it, and check "
            "that an authority that the router trusts has signed it",
            code=UNTRUSTED,
        )
    if "WRONG_VERSION_NUMBER" in said:
        return ProtocolError(
            f"the worker at {address} uses plain text, and this router uses TLS only; "
            "set tls to the same value for both",
            code=UNTRUSTED,
        )
    if "Socket closed" in said or "Connection reset" in said:
        return ConnectionLost(
            f"{said}: {address} closed the connection in the handshake; if that persists, it does not accept "
            "the router's certificate, and its log has the reason"
        )
    return ConnectionLost(said)


class GrpcDialer:
    """Dials `host:port`. `token` is the deployment's session secret, or None. With `tls` it connects to
    workers of one pool; without, it uses plain text."""

    def __init__(
        self, token: str | None, limits: GrpcDialLimits | None = None, *, tls: DialTls | None = None
    ) -> None:
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._limits = limits or GrpcDialLimits()
        self._tls = tls

    async def dial(self, address: str, hello: Hello) -> GrpcRouterConnection:
        """Connect, and exchange Hello and Welcome. Raises ConnectionLost on a timeout, and ProtocolError if
        the worker refuses, with its reason, or has the wrong identity."""
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                for _ in range(_DIALS - 1):
                    try:
                        return await self._dial(address, hello)
                    except ConnectionLost as error:
                        if _NO_REASON not in str(error):
                            raise
                return await self._dial(address, hello)
        except TimeoutError as error:
            raise ConnectionLost(
                f"no answer from {address} in {self._limits.connect_timeout_s:g} s"
            ) from error

    async def _dial(self, address: str, hello: Hello) -> GrpcRouterConnection:
        channel = self._channel(address)
        method = channel.stream_stream(
            f"/{SERVICE}/Session", request_serializer=None, response_deserializer=None
        )
        call: Call = method(None, metadata=self._metadata, wait_for_ready=False)
        connection = GrpcRouterConnection(channel, call)
        try:
            await connection.handshake(hello)
            self._check_pool(address, connection.welcome)
        except ConnectionLost as error:
            await connection.close()
            raise self._meant(error, address) from error
        except BaseException:
            await connection.close()
            raise
        return connection

    async def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        """Yield all that the worker holds; see kvasir.ports.session.Dialer."""
        limits = self._limits
        async with self._snapshot_call(address, epoch) as call:
            while True:
                try:
                    async with asyncio.timeout(limits.part_timeout_s):
                        data = await call.read()
                except TimeoutError as error:
                    raise ConnectionLost(
                        f"{address} sent no part of its snapshot in {limits.part_timeout_s:g} s"
                    ) from error
                except _BROKEN as error:
                    raise self._meant(await _ended(call, error), address) from error
                if not isinstance(data, bytes):
                    return
                yield decode_snapshot_part(data)

    @contextlib.asynccontextmanager
    async def _snapshot_call(
        self, address: str, epoch: int
    ) -> AsyncIterator[grpc.aio.UnaryStreamCall[bytes, bytes]]:
        channel = self._channel(address)
        method = channel.unary_stream(
            f"/{SERVICE}/Snapshot", request_serializer=None, response_deserializer=None
        )
        call = method(encode_snapshot_request(epoch), metadata=self._metadata, wait_for_ready=False)
        try:
            yield call
        finally:
            call.cancel()
            await channel.close(None)

    def _channel(self, address: str) -> grpc.aio.Channel:
        tls, options = self._tls, self._options()
        if tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        if problem := tls.files.invalid():
            raise ProtocolError(f"this router cannot prove its identity: {problem}", code=UNTRUSTED)
        own = tls.files.current()
        credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.chain)
        options.append(("grpc.ssl_target_name_override", tls.expected))
        return grpc.aio.secure_channel(address, credentials, options=options)

    def _check_pool(self, address: str, welcome: Welcome) -> None:
        if self._tls is not None and welcome.identity.pool != self._tls.pool:
            raise ProtocolError(
                f"{address} reports pool {welcome.identity.pool!r}, and its certificate is of "
                f"pool {self._tls.pool!r}; start it with the certificate of its pool",
                code=WRONG_IDENTITY,
            )

    def _meant(self, error: ConnectionLost | ProtocolError, address: str) -> ConnectionLost | ProtocolError:
        """Return what the error means. A loss is a new error: one that is raised from itself is a cycle, and
        keeps its connection open until garbage is collected."""
        if isinstance(error, ProtocolError):
            return error
        if self._tls is None:
            return ConnectionLost(str(error))
        return _handshake_failure(str(error), address, self._tls)

    def _options(self) -> list[tuple[str, int | str]]:
        limits = self._limits
        return [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.max_send_message_length", limits.max_message_bytes),
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.keepalive_time_ms", round(limits.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(limits.keepalive_timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
        ]
