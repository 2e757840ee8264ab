"""What a handler sees of HTTP: a whole request, and an exchange to answer it through.

There is no task and no queue between a handler and the socket: a stream's frames go from the router's
fan-out into the transport by one function call, which is what keeps a token cheap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qsl

from kvasir.core.errors import KvasirError
from kvasir.core.values import value
from kvasir.native import StreamGaps, frame_piece, http_chunk
from kvasir.ports.router import Lane
from kvasir_platform.gateway.http.errors import OPENAI_ERRORS, ErrorFormat, error_headers, error_status

log = logging.getLogger(__name__)

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

_NO_SNIFFING = b"x-content-type-options: nosniff\r\n"
_SAFETY = _NO_SNIFFING + b"cache-control: no-store\r\n"
"""Answers are a tenant's own: no cache keeps them, and no browser takes model output for a page."""

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}


@value
class HttpRequest:
    """A complete request. Header names are lower case; a header sent twice has its values joined by a
    comma. `path` is percent-encoded as sent, without scheme, host and query."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    keep_alive: bool
    chunked: bool
    """Whether the peer understands chunked answers (HTTP/1.1)."""
    query: bytes = b""
    """What follows the path's `?`, as sent."""

    @property
    def query_fields(self) -> dict[str, str]:
        """The fields of the query, empty ones too; of one that is repeated, the last."""
        return dict(parse_qsl(self.query.decode("latin-1"), keep_blank_values=True))


def _chunk(frame: bytes) -> bytes:
    """`frame` in chunked coding; nothing for an empty one, which would end the body."""
    return http_chunk(frame) if frame else b""


class ExchangeWire(Protocol):
    """The connection under an exchange."""

    def write(self, data: bytes) -> None:
        """Queue bytes for the peer."""
        ...

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> Lane | None:
        """A fast path to the peer; see kvasir.native.Lane. None where there is none at this moment."""
        ...

    def answered(self, *, close: bool) -> None:
        """The answer is complete; `close` ends the connection after it."""
        ...

    def date(self) -> bytes:
        """The Date header's line."""
        ...

    @property
    def lagging(self) -> bool:
        """Whether bytes wait for a peer that does not read fast enough."""
        ...


class Exchange:
    """One request and its answer: exactly one of `respond` and `begin … end`.

    `on_gone` is called at most once, with a code, when the client left or was cut before the answer
    was complete; after it, everything written is ignored. `on_lagging` is called whenever a stream's client
    begins to lag (maybe from within a write), `on_caught_up` when it has read what waited for it. `lines` are
    header lines that its answer carries whatever it is, `model` what it is for as metrics have it, `key` the
    name of the API key that it came with, "" without one, and `errors` the form of its errors.
    """

    __slots__ = (
        "_close",
        "_lanes",
        "_open",
        "_wire",
        "arrival_s",
        "errors",
        "key",
        "lines",
        "model",
        "on_caught_up",
        "on_gone",
        "on_lagging",
        "request",
        "request_id",
        "streaming",
    )

    def __init__(
        self,
        request: HttpRequest,
        request_id: str,
        arrival_s: float,
        wire: ExchangeWire,
        errors: ErrorFormat = OPENAI_ERRORS,
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.streaming = False
        self.on_gone: Callable[[str], None] | None = None
        self.on_lagging: Callable[[], None] | None = None
        self.on_caught_up: Callable[[], None] | None = None
        self.errors = errors
        self.lines = errors.lines(request_id)
        self.model: str | None = None
        self.key = ""
        self._wire = wire
        self._open = True
        self._lanes: list[Lane] = []
        self._close = not request.keep_alive

    @property
    def open(self) -> bool:
        """Whether an answer can still be sent."""
        return self._open

    @property
    def lagging(self) -> bool:
        """Whether the client does not keep up: what is written now waits, so that pieces which can be merged
        should be held until `on_caught_up` or the end."""
        return self._wire.lagging

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Send a whole answer. `headers` are complete lines."""
        if not self._open:
            return
        head = self._head(status, content_type, headers)
        shown = b"" if self.request.method == "HEAD" else body
        self._wire.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), shown))
        self._finish()

    def no_content(self, headers: bytes) -> None:
        """Send 204 with `headers`, complete lines."""
        if not self._open:
            return
        close = b"connection: close\r\n" if self._close else b""
        self._wire.write(
            b"%b%bx-request-id: %b\r\n%b%b%b\r\n"
            % (_STATUS_LINES[204], self._wire.date(), self.request_id.encode(), self.lines, headers, close)
        )
        self._finish()

    def file(self, status: int, content: bytes, headers: bytes) -> None:
        """Send a file that is the same for everyone, which caches may keep as `headers` say: complete lines,
        with its content type."""
        if not self._open:
            return
        length = b"" if status == 304 else b"content-length: %d\r\n" % len(content)
        close = b"connection: close\r\n" if self._close else b""
        shown = b"" if self.request.method == "HEAD" else content
        self._wire.write(
            b"%b%bx-request-id: %b\r\n%b%b%b%b%b\r\n%b"
            % (
                _STATUS_LINES[status],
                self._wire.date(),
                self.request_id.encode(),
                _NO_SNIFFING,
                self.lines,
                headers,
                length,
                close,
                shown,
            )
        )
        self._finish()

    def fail(self, error: Exception) -> None:
        """Send an error as the whole answer."""
        body = self.errors.body(error, self.request_id)
        self.respond(error_status(error), body, JSON, error_headers(error))

    def begin(self, frame: bytes, headers: bytes = b"") -> None:
        """Start an event stream with its first frame."""
        if not self._open:
            return
        self.streaming = True
        headers += b"x-accel-buffering: no\r\n"
        if self.request.chunked:
            head = self._head(200, EVENT_STREAM, headers + b"transfer-encoding: chunked\r\n")
            self._wire.write(b"%b\r\n%b" % (head, _chunk(frame)))
        else:
            self._close = True
            self._wire.write(b"%b\r\n%b" % (self._head(200, EVENT_STREAM, headers), frame))

    def frame(self, frame: bytes) -> None:
        """Send one more frame of a stream, not empty."""
        if not self._open:
            return
        if self.request.chunked:
            self._wire.write(http_chunk(frame))
        else:
            self._wire.write(frame)

    def piece(self, before: bytes, text: str, after: bytes) -> None:
        """Send `text`, as a JSON string between two constants, as one more frame."""
        if self._open:
            self._wire.write(frame_piece(before, text, after, self.request.chunked))

    def lane(self, before: bytes, after: bytes, gaps: StreamGaps) -> Lane | None:
        """As a `piece` for each text of a stream to come; see Wire.lane."""
        if not (self._open and self.streaming):
            return None
        lane = self._wire.lane(before, after, chunked=self.request.chunked, gaps=gaps)
        if lane is not None:
            self._lanes = [one for one in self._lanes if one.open]
            self._lanes.append(lane)
        return lane

    def end(self, frame: bytes, *, close: bool = False, trailers: bytes = b"") -> None:
        """Send the last frame of a stream, and end the answer. `trailers` are complete header lines, for a
        request that is `chunked`."""
        if not self._open:
            return
        self._close = self._close or close
        if self.request.chunked:
            self._wire.write(b"%b0\r\n%b\r\n" % (_chunk(frame), trailers))
        else:
            self._wire.write(frame)
        self._finish()

    def close_after(self) -> None:
        """Make this the connection's last answer."""
        self._close = True

    def gone(self, code: str) -> None:
        """The connection is lost or cut. Called by the connection."""
        if self._open:
            self._shut()
            if self.on_gone is not None:
                self.on_gone(code)

    def _head(self, status: int, content_type: bytes, headers: bytes) -> bytes:
        return b"%b%bcontent-type: %b\r\nx-request-id: %b\r\n%b%b%b%b" % (
            _STATUS_LINES[status],
            self._wire.date(),
            content_type,
            self.request_id.encode(),
            _SAFETY,
            self.lines,
            headers,
            b"connection: close\r\n" if self._close else b"",
        )

    def _finish(self) -> None:
        self._shut()
        self.on_gone = None
        self._wire.answered(close=self._close)

    def _shut(self) -> None:
        self._open = False
        self.on_lagging = self.on_caught_up = None
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()


class LaterAnswers:
    """Answers of one page that wait for workers or a store. `name` is that of their tasks, and in the log. A
    client that leaves does not stop one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: set[asyncio.Task[None]] = set()

    def answer(
        self, exchange: Exchange, work: Coroutine[Any, Any, bytes], content_type: bytes = JSON
    ) -> None:
        """Respond with what `work` returns, or with its error."""
        answering = self._respond(exchange, work, content_type)
        task = asyncio.get_running_loop().create_task(answering, name=self._name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _respond(
        self, exchange: Exchange, work: Coroutine[Any, Any, bytes], content_type: bytes
    ) -> None:
        try:
            body = await work
        except KvasirError as error:
            exchange.fail(error)
        # As in the gateway, an internal error must still produce a response.
        except Exception as error:
            log.exception("%s failed", self._name)
            exchange.fail(error)
        else:
            exchange.respond(200, body, content_type)
