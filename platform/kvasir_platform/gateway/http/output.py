"""The output side of one HTTP/1.1 connection: writing, back pressure, and closing.

While the client reads, the bytes of an answer go to the transport in one call. Otherwise they are queued in
one bounded buffer, and a client that overflows it is disconnected, so that slow clients do not determine the
gateway's memory. A connection ends with a close after all is sent, a lingering close so that a refusal can be
read, or a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from kvasir.native import Lane, SocketLane, StreamGaps
from kvasir.telemetry.reasons import CLIENT_CLOSED, SLOW_READER
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.http.limits import HttpLimits

if TYPE_CHECKING:
    from kvasir_platform.gateway.http.listener import Listener

_RESET = struct.pack("ii", 1, 0)
_QUEUE_BYTES = 8 << 10
"""Limit of bytes queued by the event loop. Each queued write costs it most of a kilobyte in addition, so
small writes to a slow reader are joined in one buffer of this class instead."""
_KERNEL_BYTES = 64 << 10
"""The kernel doubles it; without a bound it buffers megabytes for a client that does not read."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.64
"""Waits for the reset of a client that has left; each is twice the one before."""
_OVERHEAD = 0.45
"""The share of a stream's limit that queues and growing buffers take in addition to their bytes."""

IDLE, HEADERS, BODY, LINGER = "idle", "headers", "body", "linger"
"""The part of a request that is being read; LINGER: input is discarded."""


class ConnectionOutput(asyncio.Protocol, ABC):
    """The output of a connection; a base class rather than a member, so that a chunk costs no further call.
    `deadline` is in event loop time."""

    def __init__(self, listener: Listener, limits: HttpLimits) -> None:
        self._listener = listener
        self._limits = limits
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self._plain = self._offers_lanes = False
        self._reading = IDLE
        self._exchange: Exchange | None = None
        self._writable = True
        self._backlog = bytearray()
        self._overrun = False
        self._draining = False
        self._half_closed = False
        self.deadline = math.inf

    @abstractmethod
    def _rest(self) -> None:
        """Continue after an answer: with the next request, the rest of one, or idling."""

    @abstractmethod
    def _stop_reading(self) -> None:
        """Stop reading, and release buffered input."""

    def _bound_output(self, transport: asyncio.BaseTransport) -> None:
        """Write to `transport`, and limit what it and the kernel queue."""
        self._transport = cast(asyncio.Transport, transport)
        bound = self._limits.stream_buffer_bytes
        self._transport.set_write_buffer_limits(high=min(_QUEUE_BYTES, bound // 4))
        self._socket = sock = transport.get_extra_info("socket")
        self._plain = transport.get_extra_info("sslcontext") is None
        self._offers_lanes = True
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(_KERNEL_BYTES, bound))

    # -- asyncio's side

    def pause_writing(self) -> None:
        self._writable = False
        if self._exchange is None or not self._exchange.streaming:
            self._await_reader()
        elif self._exchange.on_lagging is not None:
            self._exchange.on_lagging()

    def resume_writing(self) -> None:
        self._writable = True
        self._write_backlog()
        if self._writable and self._exchange is not None and self._exchange.on_caught_up is not None:
            self._exchange.on_caught_up()
        if self._writable and self._reading != LINGER and self._exchange is None:
            self._transport.resume_reading()
            self._rest()

    def eof_received(self) -> bool:
        """The client has sent all it will: keep the connection for the answer that is due, if any. A client
        that has left altogether looks the same until something is written to it, and answers that by a
        reset. So an interim response is written, and another one later, in case the reset takes longer than
        it is waited for. Where none can be written (a stream that has begun, HTTP/1.0, TLS), the client
        counts as gone."""
        exchange = self._exchange
        if exchange is None or exchange.streaming:
            return False
        if not exchange.request.chunked or not self._transport.can_write_eof():
            return False
        self._half_closed = True
        self.deadline = math.inf
        if self._writable:
            self._write_continue()
        self._listener.loop.call_later(_FIRST_LOOK_S, self._look, _FIRST_LOOK_S)
        return True

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

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> Lane | None:
        if not (self._offers_lanes and self._writable):
            return None
        lane = SocketLane(
            fd=self._socket.fileno(),
            plain=self._plain,
            pending=self._transport.get_write_buffer_size,
            write=self.write,
            before=before,
            after=after,
            chunked=chunked,
            gaps=gaps,
        )
        # If the machine does not support it, do not retry for each delta.
        self._offers_lanes = lane.open
        return lane if lane.open else None

    def date(self) -> bytes:
        return self._listener.date()

    @property
    def lagging(self) -> bool:
        return not self._writable

    def answered(self, *, close: bool) -> None:
        self._exchange = None
        if close or self._draining:
            self._close()
        elif self._writable:
            self._rest()
        else:
            self._await_reader()

    def linger(self) -> None:
        """Half-close and discard further input: closing at once would reset the connection, and the peer
        would never read the answer. TLS cannot half-close; the answer's length marks its end."""
        self._write_backlog()
        self._stop_reading()
        self.deadline = self._listener.loop.time() + self._limits.linger_s
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # -- inside

    def _look(self, waited_s: float) -> None:
        """Cut a client that has answered the interim response by a reset, of which a socket that is not read
        from tells nobody; else look again later. Writing the answer reports a reset by itself."""
        if self._exchange is None or self._exchange.streaming or self._transport.is_closing():
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._cut(CLIENT_CLOSED)
        elif waited_s < _LAST_LOOK_S:
            self._listener.loop.call_later(2 * waited_s, self._look, 2 * waited_s)
        elif self._writable:
            self._write_continue()

    def _write_continue(self) -> None:
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _await_reader(self) -> None:
        """Stop reading until the client has read a whole answer, up to a deadline."""
        self._transport.pause_reading()
        self.deadline = self._listener.loop.time() + self._limits.body_s

    def _write_backlog(self) -> None:
        """Write what was queued for a slow reader."""
        if self._backlog:
            backlog, self._backlog = self._backlog, bytearray()
            self._transport.write(backlog)

    def _close(self) -> None:
        """Close after all written bytes are sent, up to a deadline."""
        self._write_backlog()
        self._stop_reading()
        self.deadline = self._listener.loop.time() + self._limits.body_s
        self._transport.close()

    def _cut_slow(self) -> None:
        if self._reading != LINGER:
            self._cut(SLOW_READER)

    def _cut(self, code: str) -> None:
        self._stop_reading()
        self._lose(code)
        # Reset, so that the kernel too discards unread data at once. A transport that is already
        # closing may have released its socket; uvloop then raises ValueError.
        with contextlib.suppress(OSError, ValueError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def _lose(self, code: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone(code)


class RefusalWire:
    """The wire of an exchange that only refuses: it lingers instead of closing."""

    def __init__(self, connection: ConnectionOutput) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.write(data)

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> Lane | None:
        return None

    def date(self) -> bytes:
        return self._connection.date()

    @property
    def lagging(self) -> bool:
        return self._connection.lagging

    def answered(self, *, close: bool) -> None:
        self._connection.linger()
