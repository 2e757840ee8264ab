"""Requests to one URL through httpcore, over vetted connections, with bounds on time, size and pool.

httpcore resolves no name and opens no socket here: `connect` does, and TLS is part of what it returns.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpcore2

from kvasir.config.checks.outbound import OutboundRefused, OutboundTarget
from kvasir_platform.gateway.http.outbound import Resolve, connect, system_resolve

MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 256 << 10
_MAX_AGE_S = 60.0
"""An older connection is not reused, so that a name which moves is resolved again."""
_PIECES_PER_TURN = 64
"""Pieces that a response passes to httpcore before other tasks of the event loop run."""
_MAX_TOKEN_BYTES = 16 << 10
_MALFORMED = "its answer is no sound HTTP, or too large"


class OutboundError(Exception):
    """The request has no usable response. `again`: whether a retry may succeed."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


class _ClosedWhileIdle(Exception):
    """The server closed a pooled connection before it read the request."""


@dataclass(frozen=True, slots=True)
class OutboundEndpoint:
    """Where requests go, and how. `private`: see `check_address`. `accept` is the media type of responses,
    whose bodies have at most `max_body_bytes`."""

    target: OutboundTarget
    private: bool = False
    context: ssl.SSLContext | None = None
    token_file: str | None = None
    accept: bytes = b"application/json"
    max_body_bytes: int = MAX_BODY_BYTES

    @property
    def max_response_bytes(self) -> int:
        """Bytes of a whole response, with the overhead of chunked coding."""
        return 2 * (MAX_HEAD_BYTES + self.max_body_bytes)


class _Stream(httpcore2.AsyncNetworkStream):
    """One vetted connection.

    httpcore ignores bytes that follow a response and would parse them as the next one. `read` therefore never
    passes on bytes beyond the end of a response: it returns one line at a time, and a body of known length by
    that length. Bytes that remain when a response ends are an error, and the connection is not reused.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        endpoint: OutboundEndpoint,
        now: Callable[[], float],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._endpoint = endpoint
        self._now = now
        self._opened_s = now()
        self._reused = False
        self._unread = b""
        self._at = 0
        self._received = 0
        self._passed = 0
        self._pieces = 0
        self._in_head = True
        self._body_left: int | None = None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next piece. Raise OutboundError where the response breaks off or exceeds a bound."""
        if self._at == len(self._unread):
            self._unread, self._at = await self._receive(max_bytes), 0
        if self._body_left is None:
            end = self._unread.find(b"\n", self._at) + 1 or len(self._unread)
        else:
            end = min(len(self._unread), self._at + self._body_left)
            self._body_left -= end - self._at
        piece, self._at = self._unread[self._at : end], end
        self._passed += len(piece)
        self._pieces += 1
        if self._in_head and self._passed > MAX_HEAD_BYTES:
            raise OutboundError(_MALFORMED, again=False)
        if not self._pieces % _PIECES_PER_TURN:
            await asyncio.sleep(0)
        return piece

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send a part of a request. `read` reports a lost connection."""
        self._writer.write(buffer)

    async def aclose(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    def get_extra_info(self, info: str) -> Any:
        """Return for "is_readable" whether the pool must discard this idle connection; None for the rest."""
        if info != "is_readable":
            return None
        expired = self._now() - self._opened_s >= _MAX_AGE_S
        return expired or self._has_unread() or self._reader.at_eof() or self._writer.is_closing()

    def begin_body(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Start the body of the response with these headers. Raise OutboundError where it is too long."""
        fields = {name.lower(): value for name, value in headers}
        self._in_head = False
        if b"transfer-encoding" not in fields and b"content-length" in fields:
            self._body_left = int(fields[b"content-length"])
            if self._body_left > self._endpoint.max_body_bytes:
                raise OutboundError(_MALFORMED, again=False)

    def end_response(self) -> None:
        """Make the connection ready for the next response. Raise OutboundError where bytes remain."""
        if self._has_unread():
            raise OutboundError(_MALFORMED, again=False)
        self._reused, self._in_head, self._body_left = True, True, None
        self._received = self._passed = self._pieces = 0

    def _has_unread(self) -> bool:
        return self._at < len(self._unread)

    async def _receive(self, max_bytes: int) -> bytes:
        try:
            data = await self._reader.read(max_bytes)
        except OSError:
            data = b""
        if not data:
            if self._received:
                raise OutboundError("its answer broke off", again=True)
            if self._reused:
                raise _ClosedWhileIdle
            raise OutboundError("the connection was lost", again=True)
        # httpcore would wait for the end of a line that no response begins with.
        if not self._received and not data.startswith(b"HTTP/"[: len(data)]):
            raise OutboundError(_MALFORMED, again=False)
        self._received += len(data)
        if self._received > self._endpoint.max_response_bytes:
            raise OutboundError("its answer is too large", again=False)
        return data


class _Backend(httpcore2.AsyncNetworkBackend):
    """Connects to the vetted addresses of one endpoint, whatever host httpcore names."""

    def __init__(self, endpoint: OutboundEndpoint, now: Callable[[], float], resolve: Resolve) -> None:
        self._endpoint = endpoint
        self._now = now
        self._resolve = resolve

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Open a connection, over TLS for https. Raise OutboundRefused or OutboundError."""
        endpoint = self._endpoint
        try:
            reader, writer = await connect(
                endpoint.target, private=endpoint.private, context=endpoint.context, resolve=self._resolve
            )
        except OSError as error:
            raise OutboundError(f"no connection to {endpoint.target.host}", again=True) from error
        return _Stream(reader, writer, endpoint, self._now)


class OutboundClient:
    """A connection pool for one endpoint. Use it from one event loop."""

    def __init__(
        self,
        endpoint: OutboundEndpoint,
        *,
        connections: int,
        now: Callable[[], float],
        resolve: Resolve = system_resolve,
    ) -> None:
        target = endpoint.target
        self._endpoint = endpoint
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=connections, network_backend=_Backend(endpoint, now, resolve)
        )
        # Plain http to httpcore, for https too: the backend returns streams that have done their handshake.
        self._url = httpcore2.URL(
            scheme=b"http", host=target.host, port=target.port, target=target.path.encode()
        )
        self._headers = [
            (b"host", target.authority.encode()),
            (b"accept", endpoint.accept),
            (b"user-agent", b"kvasir"),
        ]
        self._token = b""

    async def post(self, body: bytes) -> bytes:
        """Return the body of the response to `body`, which is JSON. Raise OutboundError. Set a timeout around
        it: cancellation closes the connection."""
        return await self._answered("POST", body)

    async def get(self) -> bytes:
        """Return the body of the response to a GET, as `post`."""
        return await self._answered("GET", None)

    async def _answered(self, method: str, body: bytes | None) -> bytes:
        while True:
            try:
                return await self._exchange(method, body)
            except _ClosedWhileIdle:
                continue
            except httpcore2.ProtocolError as error:
                raise OutboundError(_MALFORMED, again=False) from error
            except OutboundRefused as error:
                raise OutboundError(str(error), again=False) from error

    async def close(self) -> None:
        """Close all connections. Call it when no request runs."""
        await self._pool.aclose()

    async def _exchange(self, method: str, body: bytes | None) -> bytes:
        headers = [*self._headers, *self._authorization()]
        if body is not None:
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        async with self._pool.stream(method, self._url, headers=headers, content=body) as response:
            stream: _Stream = response.extensions["network_stream"]
            stream.begin_body(response.headers)
            data = await response.aread()
            stream.end_response()
        if len(data) > self._endpoint.max_body_bytes:
            raise OutboundError(_MALFORMED, again=False)
        status = response.status
        if status != 200:
            again = status in (408, 425, 429) or status >= 500
            raise OutboundError(f"it answered with status {status}", again=again)
        return data

    def _authorization(self) -> list[tuple[bytes, bytes]]:
        """Return the header with the token, which is read again whenever a connection is opened."""
        if self._endpoint.token_file is None:
            return []
        if not any(each.is_idle() and not each.has_expired() for each in self._pool.connections):
            try:
                self._token = read_token(Path(self._endpoint.token_file))
            except OSError as error:
                raise OutboundError("the token for it cannot be read", again=False) from error
        return [(b"authorization", b"Bearer " + self._token)]


def read_token(path: Path) -> bytes:
    """Return the token in a file. Raise OSError."""
    with path.open("rb") as file:
        token = file.read(_MAX_TOKEN_BYTES).strip()
    if not token or any(byte < 0x21 or byte > 0x7E for byte in token):
        raise OSError(f"{path} does not hold one token")
    return token
