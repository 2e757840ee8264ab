"""A Connection without loop and socket: the test controls time, the peer's reading and the handler."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, cast

from kvasir.core.errors import CapacityError, KvasirError
from kvasir_platform.gateway.http.connection import HttpConnection
from kvasir_platform.gateway.http.exchange import Exchange, ExchangeWire, HttpRequest
from kvasir_platform.gateway.http.limits import HttpLimits
from kvasir_platform.gateway.http.listener import Listener


class FakeSocket:
    """Accepts socket options. `error` is what the kernel reports of the connection, 0 for nothing."""

    def __init__(self) -> None:
        self.error = 0

    def setsockopt(self, *_: object) -> None:
        """Nothing."""

    def getsockopt(self, _level: int, _option: int) -> int:
        """Return the error, the only option that is read."""
        return self.error


class FakeTransport(asyncio.Transport):
    """Records what is written; `half` after write_eof, `gone` after close or abort."""

    def __init__(self) -> None:
        self.socket = FakeSocket()
        super().__init__({"socket": self.socket, "peername": ("192.0.2.1", 5)})
        self.sent = bytearray()
        self.reading = True
        self.half = False
        self.gone = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing."""

    def write(self, data: Any) -> None:
        """Record the data; nothing may be written after the end."""
        assert not self.half, "written after the end"
        if not self.gone:
            self.sent += data

    def pause_reading(self) -> None:
        """Stop reading."""
        self.reading = False

    def resume_reading(self) -> None:
        """Resume reading."""
        self.reading = True

    def can_write_eof(self) -> bool:
        """Half-closing is possible, as with TCP."""
        return True

    def write_eof(self) -> None:
        """Half-close."""
        self.half = True

    def is_closing(self) -> bool:
        """Return whether it was closed."""
        return self.gone

    def close(self) -> None:
        """Close."""
        self.gone = True

    def abort(self) -> None:
        """Close."""
        self.gone = True


class Bench:
    """One connection. `handler` gets whole requests; `now_s` is the loop's time."""

    def __init__(
        self, handler: Callable[[Exchange], None], limits: HttpLimits, bodies_bytes: int = 1 << 30
    ) -> None:
        self.now_s = 0.0
        self.soon: deque[Callable[[], None]] = deque()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.loop = self
        self.handle = handler
        self.early: Callable[[HttpRequest], object] | None = None
        self.held_bytes = 0
        self.probing: set[object] = set()
        self.refusals: list[KvasirError] = []
        self.open = False
        self._bodies_bytes = bodies_bytes
        self.transport = FakeTransport()
        self.connection = HttpConnection(cast(Listener, self), limits)
        self.connection.connection_made(self.transport)

    # -- the loop and the listener

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        self.timers.append((self.now_s + delay_s, partial(callback, *arguments)))

    def opened(self, _held: object, _peer: object) -> KvasirError | None:
        self.open = True
        return None

    def closed(self, _held: object) -> None:
        self.open = False

    def hold(self, size: int) -> KvasirError | None:
        self.held_bytes += size
        return CapacityError("full", code="bodies_full") if self.held_bytes > self._bodies_bytes else None

    def refused(self, error: KvasirError) -> None:
        self.refusals.append(error)

    def new_id(self) -> str:
        return "id"

    def date(self) -> bytes:
        return b""

    def exchange(self, request: HttpRequest, request_id: str, wire: ExchangeWire) -> Exchange:
        return Exchange(request, request_id, self.now_s, wire)

    # -- for tests

    def turn(self) -> None:
        """Run due callbacks, and report the transport's end to the connection."""
        while self.soon:
            self.soon.popleft()()
        if self.transport.gone and self.open:
            self.connection.connection_lost(None)

    def feed(self, data: bytes) -> bool:
        """Deliver bytes if the connection reads; a loop delivers none after the end."""
        if self.transport.gone or not self.transport.reading:
            return False
        self.connection.data_received(data)
        self.turn()
        return True

    def ends(self) -> None:
        """The peer half-closes; the transport closes unless the connection keeps it."""
        if not self.connection.eof_received():
            self.transport.close()
        self.turn()

    def later(self, seconds: float) -> None:
        """Advance time and run expired timers."""
        until_s = self.now_s + seconds
        while due := [timer for timer in self.timers if timer[0] <= until_s]:
            self.timers.remove(timer := min(due, key=itemgetter(0)))
            self.now_s, callback = timer
            callback()
            self.turn()
        self.now_s = until_s
        if self.open and self.connection.deadline <= self.now_s:
            self.connection.expire()
        self.turn()
