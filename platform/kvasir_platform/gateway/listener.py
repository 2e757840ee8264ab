"""The listening socket and its connections: accepting, deadlines, and the graceful end.

Deadlines are swept by one timer for all connections instead of a timer each: setting one is then an
assignment, and an idle gateway has no timer at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from email.utils import formatdate

from kvasir.core.errors import CapacityError, KvasirError
from kvasir_platform.gateway.connection import Connection, HttpLimits
from kvasir_platform.gateway.errors import error_body
from kvasir_platform.gateway.http import Exchange, HttpRequest, Wire

Listen = socket.socket | tuple[str, int]

_MAX_SWEEP_S = 1.0


class Listener:
    """Accepts connections and hands whole requests to `handler`, which must answer or keep the exchange.

    `new_id` makes request ids, `now` reads the gateway's clock, `wall` the time of day (seconds).
    `on_refused` hears of requests that were refused before a handler saw them.
    """

    def __init__(
        self,
        *,
        handler: Callable[[Exchange], None],
        on_refused: Callable[[KvasirError], None],
        limits: HttpLimits,
        max_connections: int,
        new_id: Callable[[], str],
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.handle = handler
        self.refused = on_refused
        self.new_id = new_id
        self._limits = limits
        self._max_connections = max_connections
        self._now = now
        self._wall = wall
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_s = min(_MAX_SWEEP_S, limits.header_s / 4, limits.body_s / 4, limits.idle_s / 4)
        self._empty = asyncio.Event()
        self._empty.set()
        self._date = b""
        self._date_until = -1.0

    async def open(self, listen: Listen) -> tuple[str, int]:
        """Bind and accept; returns the address. Raises OSError when the port is taken."""
        if isinstance(listen, socket.socket):
            self._server = await self.loop.create_server(self._connection, sock=listen, backlog=1024)
        else:
            host, port = listen
            self._server = await self.loop.create_server(self._connection, host, port, backlog=1024)
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def drain(self, grace_s: float) -> None:
        """Accept nothing more, close what idles, and let answers under way go on for `grace_s`."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close_when_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), grace_s)

    async def close(self) -> None:
        """Cut what is left; after it no connection and no timer remains."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        # An aborted connection is lost one loop iteration later.
        await self._empty.wait()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    # -- the connections' side

    def opened(self, connection: Connection) -> None:
        """Count a connection; beyond the limit it is answered 503."""
        if self._sweep is None:
            self._sweep = self.loop.call_later(self._sweep_s, self._expire)
        self._connections.add(connection)
        self._empty.clear()
        if len(self._connections) > self._max_connections:
            full = CapacityError("The gateway holds all connections it may.", code="too_many_connections")
            self.refused(full)
            body = error_body(full)
            connection.refuse_connection(
                b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
                b"x-request-id: %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                % (self.new_id().encode(), len(body), body)
            )

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def exchange(self, request: HttpRequest, request_id: str, wire: Wire) -> Exchange:
        """An exchange that arrived just now."""
        return Exchange(request, request_id, self._now(), wire)

    def date(self) -> bytes:
        """The Date header's line, made anew each second."""
        now = self._now()
        if now >= self._date_until:
            self._date = b"date: %b\r\n" % formatdate(self._wall(), usegmt=True).encode()
            self._date_until = now + 1.0
        return self._date

    def _connection(self) -> Connection:
        return Connection(self, self._limits)

    def _expire(self) -> None:
        now = self.loop.time()
        for connection in [c for c in self._connections if c.deadline <= now]:
            connection.expire()
        self._sweep = self.loop.call_later(self._sweep_s, self._expire) if self._connections else None
