"""The input side of one HTTP/1.1 connection, with a limit on everything that a client controls.

llhttp parses strictly: bare LF, and Content-Length beside Transfer-Encoding, are refused. This module adds
deadlines for headers, body and idling, limits on headers, target and body, the checks for exactly one Host
and one transfer coding, and a limit on pipelining. The output side is in `output`.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from typing import TYPE_CHECKING, NoReturn

import httptools

from kvasir.core.errors import KvasirError, RequestError
from kvasir.telemetry.reasons import CLIENT_CLOSED, SLOW_READER
from kvasir_platform.gateway.http.body import Body
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.http.json_size import SMALL_BYTES
from kvasir_platform.gateway.http.limits import HttpLimits
from kvasir_platform.gateway.http.output import BODY, HEADERS, IDLE, LINGER, ConnectionOutput, RefusalWire
from kvasir_platform.gateway.http.request_head import (
    HEALTH_LIVE,
    HEALTH_READY,
    check_coding,
    check_host,
    check_version,
    expects_continue,
    head_without_upgrade,
    target_path,
)

if TYPE_CHECKING:
    from kvasir_platform.gateway.http.listener import Listener

_MAX_PIPELINED = 8
_DROPPED = 2
"""Body limits that a client may continue to send after a refusal; reading them has a cost and no use."""
_FRAMING = 8
"""Bytes on the wire per byte of a body; regular chunks need little more than one."""
_PROBE_WITHIN_S = 1.0
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_ONLY_ONCE = frozenset(b"host authorization x-api-key content-length content-type transfer-encoding".split())


class HttpConnection(ConnectionOutput):
    """One accepted socket. `deadline` is in event loop time; the listener calls `expire` after it."""

    def __init__(self, listener: Listener, limits: HttpLimits) -> None:
        super().__init__(listener, limits)
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Exchange] = deque()
        self._refusal: KvasirError | None = None
        self._begun = False
        self._last = False
        self._upgrade = False
        self._continue_due = False
        self._wire_bytes, self._header_bytes = 0, 0
        self._headers: dict[bytes, bytes] = {}
        self._header_count = 0
        self._url = b""
        self._method = ""
        self._path = ""
        self._version = ""
        self._http11 = True
        self._body = Body()
        self._body_bytes, self._held_bytes, self._body_limit = 0, 0, limits.body_bytes
        self._body_due_s, self._judged_bytes = 0.0, 0
        self._full: KvasirError | None = None
        """Why nothing but a health probe is served here."""

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._bound_output(transport)
        self._wait_for(HEADERS)
        full = self._listener.opened(self, transport.get_extra_info("peername"))
        if full is not None and self in self._listener.probing:
            self._full = full
            self.deadline = self._listener.loop.time() + _PROBE_WITHIN_S
        elif full is not None and self._reading != LINGER:
            self._refuse(full)

    def data_received(self, data: bytes) -> None:
        if self._reading == LINGER or self._last:
            self._drop(len(data))
            return
        if self._reading == IDLE:
            # Not yet a message, but no longer idle: empty lines must not keep a connection for ever.
            self._reading = HEADERS
            self._begun = False
            self._wire_bytes = 0
            if self._exchange is None:
                self._wait_for(HEADERS)
        self._wire_bytes += len(data)
        try:
            self._feed(data)
            self._check_wire()
        except httptools.HttpParserCallbackError as error:
            if self._refusal is None:
                raise RuntimeError("a parser callback failed") from error
            if self._reading != LINGER:
                self._refuse(self._refusal)
        except httptools.HttpParserError as error:
            if (
                self._reading != LINGER and not self._last
            ):  # else: data after a request with `Connection: close`
                self._refuse(RequestError(f"Malformed HTTP request: {error}.", code="malformed_http"))
        except KvasirError as error:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._listener.closed(self)
        self._lose(CLIENT_CLOSED)
        # It holds methods of this connection, which would live on until garbage is collected.
        del self._parser

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        if self._reading == LINGER:
            self._stop("The previous response closed the connection.")
        if self._reading == IDLE and self._exchange is None:
            self._wait_for(HEADERS)  # arrived together with the preceding request
        self._reading = HEADERS
        self._begun = True
        self._method = self._path = ""
        self._headers = {}
        self._header_count = self._header_bytes = self._body_bytes = 0
        self._url = b""
        self._body.take()

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.target_bytes:
            limit = self._limits.target_bytes
            self._stop(f"The request's target exceeds {limit} bytes.", 414, "target_too_long")
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        self._count_header(len(name) + len(value) + 4)
        if self._reading == BODY:
            return  # a trailer: counted and ignored
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
        parser = self._parser
        self._method = parser.get_method().decode("ascii")
        self._version = parser.get_http_version()
        if parser.should_upgrade() and self._method != "CONNECT":
            self._upgrade = True
            return
        try:
            self._check_head()
        except KvasirError as error:
            self._stop_with(error)
        self._reading = BODY
        if self._exchange is None:
            self._wait_for(BODY)
            if self._continue_due:
                self._continue()

    def on_body(self, body: bytes) -> None:
        size = len(body)
        self._body_bytes += size
        self._held_bytes += size
        full = self._listener.hold(size)
        # Bodies of pipelined requests count too, otherwise pipelining would multiply the limit.
        if self._held_bytes > self._body_limit:
            self._body_too_large()
        if full is not None:
            self._stop_with(full)
        try:
            self._body.add(body)
        except KvasirError as error:
            self._stop_with(error)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        self._reading = IDLE
        # The rest of this piece belongs to the next request; only later data counts for that one.
        self._wire_bytes = 0
        request = self._request(self._body.take())
        self._last = not request.keep_alive
        exchange = self._listener.exchange(request, self._request_id(), self)
        if len(self._waiting) >= _MAX_PIPELINED:
            self._stop("Too many pipelined requests.")
        self._waiting.append(exchange)
        if self._exchange is None:
            self._next()

    # -- callbacks of the listener

    def close_when_idle(self) -> None:
        """Close now, or after the running response."""
        self._draining = True
        if self._exchange is not None:
            self._exchange.close_after()
        elif not self._waiting and not (self._begun and self._reading in (HEADERS, BODY)):
            self._close()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._cut(CLIENT_CLOSED)

    def expire(self) -> None:
        """Handle a passed deadline: respond if a request had begun, then close."""
        if self._reading == LINGER or not self._writable:
            self._cut(SLOW_READER)
        elif self._full is not None and not self._begun:
            self._refuse(self._full)
        elif self._reading == BODY:
            self._judge_body()
        elif self._reading == HEADERS and self._begun:
            self._refuse(RequestError("Timed out reading the headers.", status=408, code="header_timeout"))
        else:
            self._close()

    # -- inside

    def _rest(self) -> None:
        if self._waiting:
            # Deferred, because this may run inside the router's fan-out, which is not reentrant.
            self._listener.loop.call_soon(self._next)
        elif self._half_closed:
            self._close()
        elif self._reading == IDLE:
            self.deadline = self._listener.loop.time() + self._limits.idle_s
        else:
            self._wait_for(self._reading)
            if self._reading == BODY and self._continue_due:
                self._continue()

    def _feed(self, data: bytes) -> None:
        """Parse. An upgrade offer is ignored: the parser stops at it, without a body, so a fresh parser reads
        the same request without the offer."""
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
            self._upgrade = False
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(
                head_without_upgrade(self._method, self._url, self._version, self._headers)
            )

    def _request(self, body: bytes) -> HttpRequest:
        return HttpRequest(
            method=self._method,
            path=self._path,
            headers=self._headers,
            body=body,
            keep_alive=self._parser.should_keep_alive() and self._full is None,
            chunked=self._http11,
            query=self._url.partition(b"?")[2],
        )

    def _check_head(self) -> None:
        """Refuse requests that are ambiguous, too large, or rejected by `early`."""
        headers, limits = self._headers, self._limits
        self._http11 = check_version(self._version)
        check_host(headers.get(b"host"), http11=self._http11)
        self._path = target_path(self._url, self._method)
        if self._full is not None and self._path not in (HEALTH_LIVE, HEALTH_READY):
            raise self._full
        coding = headers.get(b"transfer-encoding")
        check_coding(coding, http11=self._http11)
        size = int(headers.get(b"content-length", b"0"))
        self._continue_due = expects_continue(headers)
        early = self._listener.early
        self._body_limit = limits.body_bytes
        is_large = size > SMALL_BYTES or coding is not None or self._continue_due
        if early is not None and is_large and early(self._request(b"")):
            self._body_limit, self._body.is_json = limits.upload_bytes, False
        if size > self._body_limit:
            self._body_too_large()

    def _continue(self) -> None:
        self._continue_due = False
        if self._http11:
            self._write_continue()

    def _judge_body(self) -> None:
        """Check the deadline and the transfer rate of the body."""
        limits, now = self._limits, self._listener.loop.time()
        window_s = limits.header_s / 2
        if now >= self._body_due_s or self._body_bytes - self._judged_bytes < limits.body_rate * window_s:
            self._refuse(RequestError("Timed out reading the body.", status=408, code="body_timeout"))
            return
        self._judged_bytes = self._body_bytes
        self.deadline = min(self._body_due_s, now + window_s)

    def _wait_for(self, part: str) -> None:
        now, limits = self._listener.loop.time(), self._limits
        if part == BODY:
            self._body_due_s = now + limits.body_s
            self._judged_bytes = self._body_bytes
            self.deadline = min(self._body_due_s, now + limits.header_s / 2)
        else:
            self.deadline = now + limits.header_s

    def _next(self) -> None:
        if self._exchange is not None or not self._waiting or not self._writable:
            return
        self._exchange = self._waiting.popleft()
        self._release(len(self._exchange.request.body))
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
        if self._header_bytes > self._limits.header_bytes or self._header_count > self._limits.header_fields:
            self._headers_too_large()

    def _drop(self, size: int) -> None:
        """Count data of a client that keeps sending after a refusal."""
        self._wire_bytes += size
        if self._wire_bytes > _DROPPED * self._limits.body_bytes:
            self._cut(CLIENT_CLOSED)

    def _check_wire(self) -> None:
        """Enforce limits that the parser callbacks cannot see: one endless header, or a body that is mostly
        framing."""
        limits = self._limits
        if self._reading == HEADERS and self._wire_bytes > limits.header_bytes:
            self._headers_too_large()
        elif self._reading == BODY:
            framing = self._wire_bytes - self._body_bytes
            if framing > limits.header_bytes + min(_FRAMING * self._body_bytes, limits.body_bytes):
                self._stop(
                    "The body's chunks are too small: too much framing per byte.", 413, "body_too_large"
                )

    def _headers_too_large(self) -> NoReturn:
        self._stop(
            f"The headers exceed {self._limits.header_bytes} bytes or {self._limits.header_fields} fields.",
            431,
            "headers_too_large",
        )

    def _body_too_large(self) -> NoReturn:
        self._stop(f"The body exceeds {self._body_limit} bytes.", 413, "body_too_large")

    def _stop(self, message: str, status: int = 400, code: str = "malformed_http") -> NoReturn:
        self._stop_with(RequestError(message, status=status, code=code))

    def _stop_with(self, error: KvasirError) -> NoReturn:
        """Raise from a parser callback; the parser hides the exception, so it is also stored."""
        self._refusal = error
        raise error

    def _refuse(self, error: KvasirError) -> None:
        """Respond with `error` and close; a running response is cut instead."""
        if self._exchange is not None:
            self._cut(CLIENT_CLOSED)
            return
        path = self._path or self._url.partition(b"?")[0].decode("latin-1")
        empty = HttpRequest(self._method, path, self._headers, b"", keep_alive=False, chunked=False)
        exchange = self._listener.exchange(empty, self._request_id(), RefusalWire(self))
        self._listener.refused(error)
        exchange.fail(error)

    def _stop_reading(self) -> None:
        self._reading = LINGER
        self._wire_bytes = 0
        self._waiting.clear()
        self._body.take()
        self._release(self._held_bytes)

    def _release(self, size: int) -> None:
        self._held_bytes -= size
        self._listener.hold(-size)
