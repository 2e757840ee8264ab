"""The listening socket and its connections: accepting, deadlines, and graceful shutdown.

One timer checks the deadlines of all connections: setting a deadline is an assignment, and an idle gateway
has no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from email.utils import formatdate

from kvasir.config.spec.edge import GatewaySpec
from kvasir.core.errors import CapacityError, KvasirError
from kvasir_platform.gateway.http.clients import ClientConnections, is_loopback
from kvasir_platform.gateway.http.connection import HttpConnection
from kvasir_platform.gateway.http.cors import Cors
from kvasir_platform.gateway.http.errors import OPENAI_ERRORS, ErrorFormat
from kvasir_platform.gateway.http.exchange import Exchange, ExchangeWire, HttpRequest
from kvasir_platform.gateway.http.limits import HttpLimits
from kvasir_platform.gateway.http.tls import EdgeCertificate, Handshake, Held, accept_secure

Listen = socket.socket | list[socket.socket] | tuple[str, int]
ErrorFormats = Callable[[str, Mapping[bytes, bytes]], ErrorFormat]
"""From the path and the headers of a request to the form of its errors."""

_MAX_SWEEP_S = 0.5
_BACKLOG = 1024
_PROBES = 16
"""Connections beyond the limit that may ask for the health of the gateway, from this machine."""
_REFUSALS = 256
"""Connections beyond the limit that may be told so at one moment; the rest are cut without a word."""


class Listener:
    """Accepts connections and passes complete requests to `handler`, which must respond or keep the exchange.

    `early` is called for requests with a large body, or one of unknown length, before the body is read. It
    returns whether the body is a form with a file, and raises KvasirError to refuse the request. `on_refused`
    is called for requests refused before a handler. `errors` chooses the form of a request's errors; of a
    malformed request the path may be incomplete. `new_id` returns request ids, `now` the time of the
    gateway's clock, `wall` Unix time (seconds). Raise ConfigError for invalid certificates.
    """

    def __init__(
        self,
        spec: GatewaySpec,
        *,
        handler: Callable[[Exchange], None],
        on_refused: Callable[[KvasirError], None],
        new_id: Callable[[], str],
        now: Callable[[], float],
        wall: Callable[[], float],
        early: Callable[[HttpRequest], bool] | None = None,
        cors: Cors | None = None,
        errors: ErrorFormats = lambda _path, _headers: OPENAI_ERRORS,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.handle = handler
        self.refused = on_refused
        self.early = early
        self.new_id = new_id
        self._errors = errors
        self._cors = cors if cors is not None and cors.enabled else None
        self._limits = limits = HttpLimits.of(spec)
        self._max_connections = spec.max_connections
        self._clients = ClientConnections(spec.max_connections_per_client, spec.trusted_proxies)
        self._bodies_bytes = 0
        self._max_bodies_bytes = spec.max_bodies_bytes
        self.certificate = (
            None if spec.tls.cert_file is None else EdgeCertificate(spec.tls, now=now, wall=wall)
        )
        self._handshake_s = spec.tls.handshake_timeout_s
        self._now = now
        self._wall = wall
        self._connections: dict[Held, bytes | None] = {}
        self.probing: set[Held] = set()
        """Connections from this machine beyond the limit, which may ask for its health."""
        self._stop_accepting: list[Callable[[], object]] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_s = min(_MAX_SWEEP_S, limits.header_s / 4, limits.body_s / 4, limits.idle_s / 4)
        self._empty = asyncio.Event()
        self._empty.set()
        self._date = b""
        self._date_until = -1.0

    async def open(self, listen: Listen) -> tuple[str, int]:
        """Bind and accept; return the address. Raise OSError if the port is in use."""
        if isinstance(listen, tuple):
            sockets = await self._bind(*listen)
        else:
            sockets = listen if isinstance(listen, list) else [listen]
        for sock in sockets:
            sock.setblocking(False)
            if self.certificate is None:
                server = await self.loop.create_server(self._plain, sock=sock, backlog=_BACKLOG)
                self._stop_accepting.append(server.close)
            else:
                sock.listen(_BACKLOG)
                accepting = accept_secure(self, sock, self.certificate, self._limits, self._handshake_s)
                task = self.loop.create_task(accepting, name="accept-tls")
                self._stop_accepting += [task.cancel, sock.close]
        address = sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def drain(self, grace_s: float) -> None:
        """Stop accepting, close idle connections, and wait up to `grace_s` for running responses."""
        self._accept_no_more()
        for held in list(self._connections):
            held.close_when_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), grace_s)

    async def close(self) -> None:
        """Close the remaining connections; no connection and no timer remains."""
        self._accept_no_more()
        for held in list(self._connections):
            held.abort()
        # An aborted connection is lost one loop iteration later.
        await self._empty.wait()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    async def _bind(self, host: str, port: int) -> list[socket.socket]:
        """A socket for each address of `host`."""
        found = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets: list[socket.socket] = []
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                sockets.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
        except OSError:
            for sock in sockets:
                sock.close()
            raise
        return sockets

    def _accept_no_more(self) -> None:
        while self._stop_accepting:
            self._stop_accepting.pop(0)()

    # -- the connections' side

    def opened(self, held: Held, peer: object) -> KvasirError | None:
        """Count a connection from `peer`, a socket's peer name; return the error if it exceeds a limit."""
        if held in self._connections:
            return None  # lifted to TLS
        if self._sweep is None:
            self._sweep = self.loop.call_later(self._sweep_s, self._expire)
        client, welcome = self._clients.enter(peer)
        self._connections[held] = client
        self._empty.clear()
        over = len(self._connections) - self._max_connections
        if over > 0:
            if len(self.probing) < _PROBES and is_loopback(peer):
                self.probing.add(held)
            elif over > _REFUSALS:
                held.abort()
            return CapacityError("The gateway has reached its connection limit.", code="too_many_connections")
        if not welcome:
            return CapacityError(
                "This client has reached its connection limit.", code="too_many_client_connections"
            )
        return None

    def secured(self, handshake: Handshake, connection: HttpConnection) -> None:
        """Replace `handshake` by `connection`."""
        self._connections[connection] = self._connections.pop(handshake, None)

    def closed(self, held: Held) -> None:
        """Remove a connection. Idempotent."""
        self.probing.discard(held)
        if held not in self._connections:
            return
        self._clients.leave(self._connections.pop(held))
        if not self._connections:
            self._empty.set()

    def hold(self, size: int) -> KvasirError | None:
        """Count buffered body bytes (negative: released); return the error if they exceed the limit."""
        self._bodies_bytes += size
        if self._bodies_bytes > self._max_bodies_bytes:
            return CapacityError(
                "The gateway has reached its limit on buffered request bodies.", code="bodies_full"
            )
        return None

    def exchange(self, request: HttpRequest, request_id: str, wire: ExchangeWire) -> Exchange:
        """Return an exchange for a request that has just arrived."""
        errors = self._errors(request.path, request.headers)
        exchange = Exchange(request, request_id, self._now(), wire, errors)
        if self._cors is not None:
            exchange.lines += self._cors.lines(request.headers)
        return exchange

    def date(self) -> bytes:
        """Return the Date header line, rendered once a second."""
        now = self._now()
        if now >= self._date_until:
            self._date = b"date: %b\r\n" % formatdate(self._wall(), usegmt=True).encode()
            self._date_until = now + 1.0
        return self._date

    def _plain(self) -> HttpConnection:
        return HttpConnection(self, self._limits)

    def _expire(self) -> None:
        now = self.loop.time()
        for connection in [c for c in self._connections if c.deadline <= now]:
            connection.expire()
        self._sweep = self.loop.call_later(self._sweep_s, self._expire) if self._connections else None
