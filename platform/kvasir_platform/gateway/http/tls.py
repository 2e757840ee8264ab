"""HTTPS on the gateway: the latest valid certificate for each handshake, and a limit on handshakes.

A connection counts from when it is accepted, so that a slow handshake costs no more than slow headers. The
servers of the event loop report a connection only after its handshake, so sockets are accepted here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from kvasir.config.spec.edge import EdgeTlsSpec
from kvasir.core.errors import ConfigError, KvasirError
from kvasir.telemetry.reasons import TLS_FAILED
from kvasir.wire.tls import certificate_problem, certificates_in, read_pem
from kvasir_platform.gateway.http.connection import HttpConnection
from kvasir_platform.gateway.http.limits import HttpLimits

if TYPE_CHECKING:
    from kvasir_platform.gateway.http.listener import Listener

_log = logging.getLogger(__name__)

_RECHECK_S = 1.0
_SHUTDOWN_S = 5.0
_ACCEPT_AGAIN_S = 0.1
_CIPHERS_1_2 = "ECDHE+AESGCM:ECDHE+CHACHA20"
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
Stamp = tuple[tuple[int, int, int], ...]


class EdgeCertificate:
    """The gateway's certificate and key, reloaded when a file changes. An invalid set is logged once, and the
    last valid one stays in use. `now` is any clock and `wall` Unix time (seconds). Raise ConfigError if the
    first set is invalid, or if the spec names none."""

    def __init__(self, spec: EdgeTlsSpec, *, now: Callable[[], float], wall: Callable[[], float]) -> None:
        if spec.cert_file is None or spec.key_file is None:
            raise ConfigError("gateway.tls: name cert_file and key_file")
        self._cert, self._key = Path(spec.cert_file), Path(spec.key_file)
        self._clients = None if spec.client_ca_file is None else Path(spec.client_ca_file)
        self._operator = None if spec.operator_cert_file is None else Path(spec.operator_cert_file)
        self._minimum = _VERSIONS[spec.minimum]
        self._now = now
        self._wall = wall
        self._stamp = self._look()
        self._expires_s = 0.0
        self._context = self._load()
        self._recheck_s = now() + _RECHECK_S

    def context(self) -> ssl.SSLContext:
        """Return the context of the next handshake. Checks the files at most once a second."""
        now = self._now()
        if now >= self._recheck_s:
            self._recheck_s = now + _RECHECK_S
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._context = self._load()
                except ConfigError as error:
                    _log.error("keeping the last valid gateway certificate: %s", error.message)
        return self._context

    def expires_s(self) -> float:
        """Return when the current certificate expires, in Unix seconds."""
        return self._expires_s

    def _look(self) -> Stamp:
        found = []
        for path in (self._cert, self._key, self._clients, self._operator):
            try:
                status = None if path is None else path.stat()
            except OSError:
                status = None
            found.append((0, 0, 0) if status is None else (status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _load(self) -> ssl.SSLContext:
        if problem := certificate_problem(self._cert, self._key, self._clients, self._wall()):
            raise ConfigError(problem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._minimum
        context.set_ciphers(_CIPHERS_1_2)
        context.set_alpn_protocols(["http/1.1"])
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            # The password is for a file that was swapped since: OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
            if self._clients is not None:
                context.load_verify_locations(self._clients)
                context.verify_mode = ssl.CERT_REQUIRED
                if self._operator is not None:
                    # Of this file one certificate, so that nobody else whom its authority certified gets in.
                    context.load_verify_locations(cadata=_first(self._operator).public_bytes(Encoding.DER))
            expires = _first(self._cert).not_valid_after_utc
        except OSError as error:
            raise ConfigError(f"gateway.tls: cannot load {self._cert}: {error}") from error
        self._expires_s = expires.timestamp()
        return context


def _first(path: Path) -> x509.Certificate:
    """Return the first certificate of a PEM file. Raise ConfigError."""
    return certificates_in(path, read_pem(path))[0]


class Handshake:
    """An accepted socket until its TLS handshake is complete and an HttpConnection replaces it. The handshake
    timeout of the event loop limits it."""

    def __init__(self, listener: Listener, sock: socket.socket, peer: object) -> None:
        self.deadline = math.inf
        self._listener = listener
        self._sock = sock
        self._peer = peer
        self._task: asyncio.Task[None] | None = None

    def begin(self, context: ssl.SSLContext, limits: HttpLimits, timeout_s: float) -> None:
        """Start the handshake, unless there are too many connections: no error can be sent before TLS is
        up."""
        if self._listener.opened(self, self._peer) is None:
            self._task = self._listener.loop.create_task(self._shake(context, limits, timeout_s))
        else:
            self._sock.close()
            self._listener.closed(self)

    def close_when_idle(self) -> None:
        """Close: no request has begun."""
        self.abort()

    def abort(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()

    def expire(self) -> None:
        """Close: the deadline has passed."""
        self.abort()

    async def _shake(self, context: ssl.SSLContext, limits: HttpLimits, timeout_s: float) -> None:
        listener = self._listener
        try:
            await listener.loop.connect_accepted_socket(
                lambda: _SecureConnection(listener, limits, self),
                self._sock,
                ssl=context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError as error:  # ssl.SSLError, timeouts and resets alike
            _log.debug("a TLS handshake failed", exc_info=error)
            listener.refused(KvasirError("The TLS handshake failed.", code=TLS_FAILED))
        finally:
            listener.closed(self)


class _SecureConnection(HttpConnection):
    """A connection over TLS, counted since it was accepted."""

    def __init__(self, listener: Listener, limits: HttpLimits, handshake: Handshake) -> None:
        super().__init__(listener, limits)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._listener.secured(self._handshake, self)
        super().connection_made(transport)


Held = HttpConnection | Handshake
"""What a listener keeps of an accepted socket."""


async def accept_secure(
    listener: Listener,
    sock: socket.socket,
    certificate: EdgeCertificate,
    limits: HttpLimits,
    timeout_s: float,
) -> NoReturn:
    """Accept on `sock`, which must not block, until cancelled."""
    while True:
        try:
            accepted, peer = await listener.loop.sock_accept(sock)
        except OSError as error:  # no descriptors are left, or the client left first
            _log.warning("a connection could not be accepted: %s", error)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            continue
        Handshake(listener, accepted, peer).begin(certificate.context(), limits, timeout_s)
