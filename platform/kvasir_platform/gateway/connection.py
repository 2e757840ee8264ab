"""One HTTP/1.1 connection, with a limit on everything that a client controls.

Parsing is llhttp's (strict: bare LF, and Content-Length beside Transfer-Encoding, are refused). What a
parser does not do is here: deadlines for headers, body and idling, caps on headers and body, exactly one
Host, a bound on pipelining, a lingering close so that a refusal can be read, and a cut for clients that
do not read their stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import httptools

from kvasir.core.errors import RequestError
from kvasir.telemetry.reasons import CLIENT_CLOSED, SLOW_READER
from kvasir_platform.gateway.errors import error_status
from kvasir_platform.gateway.http import Exchange, HttpRequest

if TYPE_CHECKING:
    from kvasir_platform.gateway.listener import Listener

_MAX_HEADERS = 128
_MAX_PIPELINED = 8
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SANE_HOST = re.compile(rb"[A-Za-z0-9._:\[\]-]{1,255}")
_ONLY_ONCE = frozenset((b"host", b"authorization", b"content-length", b"content-type", b"transfer-encoding"))

_RESET = struct.pack("ii", 1, 0)
_QUEUE_BYTES = 8 << 10
"""What the loop may queue. Each queued write costs it most of a kilobyte beside its bytes, so that small ones
wait for a slow reader in one piece of ours instead."""
_KERNEL_BYTES = 64 << 10
"""The kernel doubles it; without a bound it buffers megabytes for a client that does not read."""
_OVERHEAD = 0.45
"""The part of a stream's bound that queues and growing buffers take beside the bytes in them."""

IDLE, HEADERS, BODY, LINGER = "idle", "headers", "body", "linger"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one connection; bytes and seconds."""

    header_bytes: int = 64 << 10
    body_bytes: int = 8 << 20
    header_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 75.0
    linger_s: float = 2.0
    stream_buffer_bytes: int = 256 << 10


class _Refused(Exception):
    """Stops the parser from inside a callback, which hides it: the connection keeps the error too."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class Connection(asyncio.Protocol):
    """One accepted socket. `deadline` is in the loop's time; the listener calls `expire` after it."""

    def __init__(self, listener: Listener, limits: HttpLimits) -> None:
        self._listener = listener
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._writable = True
        self._backlog = bytearray()
        self._overrun = False
        self._draining = False
        self._refusal: RequestError | None = None
        self._reading = IDLE
        self._wire_bytes = 0
        self._header_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._header_count = 0
        self._url = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.deadline = math.inf

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        bound = self._limits.stream_buffer_bytes
        self._transport.set_write_buffer_limits(high=min(_QUEUE_BYTES, bound // 4))
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(_KERNEL_BYTES, bound))
        self._wait_for(HEADERS)
        self._reading = IDLE
        self._listener.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._reading == LINGER:
            return
        if self._reading == IDLE:
            self._wire_bytes = 0
            if self._exchange is None:
                self._wait_for(HEADERS)
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
            self._check_wire()
        except httptools.HttpParserUpgrade:
            self.close_when_idle()
        except httptools.HttpParserCallbackError as error:
            if self._refusal is None:
                raise RuntimeError("a parser callback failed") from error
            self._refuse(self._refusal)
        except httptools.HttpParserError as error:
            if self._reading != LINGER:  # else data after a request that asked to close
                self._refuse(RequestError(f"Malformed HTTP request: {error}.", code="malformed_http"))
        except _Refused as refused:
            self._refuse(refused.error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading = LINGER
        self._waiting.clear()
        self._listener.closed(self)
        self._lose(CLIENT_CLOSED)

    def pause_writing(self) -> None:
        self._writable = False
        if self._exchange is None or not self._exchange.streaming:
            self._await_reader()

    def resume_writing(self) -> None:
        self._writable = True
        self._write_backlog()
        if self._writable and self._reading != LINGER and self._exchange is None:
            self._transport.resume_reading()
            self._rest()

    # -- the parser's side

    def on_message_begin(self) -> None:
        self._reading = HEADERS
        self._headers = {}
        self._header_count = self._header_bytes = self._body_bytes = 0
        self._url = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._count_header(len(name) + len(value) + 4)
        if self._reading == BODY:
            return  # a trailer: counted, and of no use
        name = name.lower()
        earlier = self._headers.get(name)
        if earlier is None:
            self._headers[name] = value
        elif name in _ONLY_ONCE:
            code = "missing_host" if name == b"host" else "malformed_http"
            self._stop(f"Header {name.decode()} was sent more than once.", code=code)
        else:
            self._headers[name] = earlier + b", " + value

    def on_headers_complete(self) -> None:
        headers, limits = self._headers, self._limits
        host = headers.get(b"host")
        if host is None:
            if self._parser.get_http_version() != "1.0":
                self._stop("The Host header is missing.", code="missing_host")
        elif not _SANE_HOST.fullmatch(host.strip()):
            self._stop("The Host header is not a host name.", code="missing_host")
        length = headers.get(b"content-length")
        if length is not None and int(length) > limits.body_bytes:
            self._body_too_large()
        self._reading = BODY
        if self._exchange is None:
            self._wait_for(BODY)
        expect = headers.get(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                self._stop("Only Expect: 100-continue is understood.", 417, "expectation_failed")
            if self._exchange is None:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            self._body_too_large()
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._reading = IDLE
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        http11 = self._parser.get_http_version() != "1.0"
        request = HttpRequest(
            method=self._parser.get_method().decode("ascii"),
            path=self._url.partition(b"?")[0].decode("latin-1"),
            headers=self._headers,
            body=body,
            keep_alive=self._parser.should_keep_alive(),
            chunked=http11,
        )
        exchange = self._listener.exchange(request, self._request_id(), self)
        if len(self._waiting) >= _MAX_PIPELINED:
            self._stop("Too many pipelined requests.", code="malformed_http")
        self._waiting.append(exchange)
        if self._exchange is None:
            self._next()

    # -- the exchange's side

    def write(self, data: bytes) -> None:
        if self._writable:
            self._transport.write(data)
        elif len(self._backlog) + len(data) <= self._limits.stream_buffer_bytes * (1.0 - _OVERHEAD):
            self._backlog += data
        elif not self._overrun:
            self._overrun = True
            # Later, because this runs inside the router's fan-out, which must not be re-entered.
            self._listener.loop.call_soon(self._cut_slow)

    def date(self) -> bytes:
        return self._listener.date()

    def answered(self, *, close: bool) -> None:
        self._exchange = None
        if close or self._draining:
            self._close()
        elif self._writable:
            self._rest()
        else:
            self._await_reader()

    # -- the listener's side

    def close_when_idle(self) -> None:
        """Close now, or after the answer that is being sent."""
        self._draining = True
        if self._exchange is not None:
            self._exchange.close_after()
        elif not self._waiting:
            self._close()

    def abort(self) -> None:
        """Cut the connection, whatever it is doing."""
        self._cut(CLIENT_CLOSED)

    def expire(self) -> None:
        """The deadline has passed: say so if a request had begun, then close."""
        if self._reading == HEADERS and self._writable:
            self._refuse(RequestError("The headers came too slowly.", status=408, code="header_timeout"))
        elif self._reading == BODY and self._writable:
            self._refuse(RequestError("The body came too slowly.", status=408, code="body_timeout"))
        elif self._reading == IDLE and self._writable:
            self._close()
        else:
            self._cut(SLOW_READER)

    def refuse_connection(self, answer: bytes) -> None:
        """Answer before any request was read, and close."""
        self._transport.write(answer)
        self.linger()

    # -- inside

    def _rest(self) -> None:
        """What comes after an answer: the next request, the rest of one, or idling."""
        if self._waiting:
            # Later, because this may run inside the router's fan-out, which must not be re-entered.
            self._listener.loop.call_soon(self._next)
        elif self._reading == IDLE:
            self.deadline = self._listener.loop.time() + self._limits.idle_s
        else:
            self._wait_for(self._reading)

    def _await_reader(self) -> None:
        """A whole answer waits for its reader: take nothing more, and not for ever."""
        self._transport.pause_reading()
        self.deadline = self._listener.loop.time() + self._limits.body_s

    def _cut_slow(self) -> None:
        if self._reading != LINGER:
            self._cut(SLOW_READER)

    def _write_backlog(self) -> None:
        """Hand over what waited for a slow reader."""
        if self._backlog:
            backlog, self._backlog = self._backlog, bytearray()
            self._transport.write(backlog)

    def _close(self) -> None:
        """Close when what was written has left, within a bound."""
        self._write_backlog()
        self._reading = LINGER
        self._waiting.clear()
        self.deadline = self._listener.loop.time() + self._limits.body_s
        self._transport.close()

    def _wait_for(self, part: str) -> None:
        seconds = self._limits.header_s if part in (IDLE, HEADERS) else self._limits.body_s
        self.deadline = self._listener.loop.time() + seconds

    def _next(self) -> None:
        if self._exchange is not None or not self._waiting or not self._writable:
            return
        self._exchange = self._waiting.popleft()
        self.deadline = math.inf
        if self._draining:
            self._exchange.close_after()
        self._listener.handle(self._exchange)

    def _request_id(self) -> str:
        given = self._headers.get(b"x-request-id")
        if given is not None and _SANE_ID.fullmatch(given):
            return given.decode("ascii")
        return self._listener.new_id()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes or self._header_count > _MAX_HEADERS:
            self._headers_too_large()

    def _check_wire(self) -> None:
        """Catch what the callbacks cannot see: one endless header, or a body that is all framing."""
        if self._reading == HEADERS and self._wire_bytes > self._limits.header_bytes:
            self._headers_too_large()
        if self._reading == BODY and self._wire_bytes > 2 * self._limits.body_bytes:
            self._body_too_large()

    def _headers_too_large(self) -> None:
        self._stop(
            f"The headers exceed {self._limits.header_bytes} bytes or {_MAX_HEADERS} fields.",
            431,
            "headers_too_large",
        )

    def _body_too_large(self) -> None:
        self._stop(f"The body exceeds {self._limits.body_bytes} bytes.", 413, "body_too_large")

    def _stop(self, message: str, status: int = 400, code: str = "malformed_http") -> None:
        self._refusal = RequestError(message, status=status, code=code)
        raise _Refused(self._refusal)

    def _refuse(self, error: RequestError) -> None:
        """Answer `error` and end the connection; an answer under way is cut instead."""
        self._waiting.clear()
        self._body = []
        if self._exchange is not None:
            self._cut(CLIENT_CLOSED)
            return
        empty = HttpRequest("", "", self._headers, b"", keep_alive=False, chunked=False)
        exchange = self._listener.exchange(empty, self._request_id(), _Refusal(self))
        self._listener.refused(error)
        exchange.fail(error_status(error), error)

    def linger(self) -> None:
        """Half-close and drop what still comes: closing at once would reset the connection, and the
        peer would never read the answer."""
        self._write_backlog()
        self._reading = LINGER
        self.deadline = self._listener.loop.time() + self._limits.linger_s
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _cut(self, code: str) -> None:
        self._reading = LINGER
        self._waiting.clear()
        self._lose(code)
        # Reset, so that the kernel too drops at once what the client did not read. A transport that is
        # closing already may have let go of its socket.
        with contextlib.suppress(OSError):
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def _lose(self, code: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone(code)


class _Refusal:
    """The wire of an exchange that only refuses: it lingers where others close."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.write(data)

    def date(self) -> bytes:
        return self._connection.date()

    def answered(self, *, close: bool) -> None:
        self._connection.linger()
