"""The connection of one pair of agents for KV in host memory: TCP, from the KV of one to that of the other.

It takes pieces of memory as they are, so that nothing is staged, and sums what it receives while that is in
the CPU's cache. gloo moves the same bytes through an event loop of its own, at less than a socket's rate.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.native import receive_pieces, send_pieces
from kvasir_workers.transfer.common.memory import HostPieces

SERVER = 0
LINK_TIMEOUT_S = 60.0
"""A message that the other side announced but does not send within this time ends the link. Pulls have their
own deadlines; this one covers chunks of abandoned pulls."""
CONNECT_S = 10.0
ADDRESS = "address"
_TIME = struct.Struct("@ll")


class StoreRelay(Protocol):
    """The part of the control connection with which two sides meet. All methods may raise TransferError."""

    def put(self, key: str, value: bytes) -> None:
        """Send a key to the other side."""
        ...

    def next(self) -> tuple[str, bytes]:
        """Wait for the next key from the other side."""
        ...

    def await_connection(self, listener: socket.socket) -> None:
        """Wait until a connection comes to the listener."""
        ...


class SocketLink:
    """See group.NcclGroupLink. What moves are HostPieces or a tensor. A send is complete when it returns; a
    receive happens in `finish`, which also sums the pieces."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time(LINK_TIMEOUT_S))
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, data: Any, tag: int) -> Any:
        """See NcclGroupLink."""
        pieces = _pieces(data)
        with _translated():
            send_pieces(self._connection.fileno(), pieces.at.data, pieces.lengths.data)

    def receive(self, data: Any, tag: int) -> HostPieces:
        """See NcclGroupLink."""
        return _pieces(data)

    def finish(self, work: Any, limit_s: float = LINK_TIMEOUT_S) -> None:
        """See NcclGroupLink."""
        if work is None:
            return
        with _translated():
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(limit_s))
            sums = receive_pieces(
                self._connection.fileno(), work.at.data, work.lengths.data, work.rows, work.parts
            )
        if work.parts:
            work.sums = np.frombuffer(sums, dtype=np.uint64).reshape(work.rows, work.parts)

    def abort(self) -> None:
        """See NcclGroupLink."""
        with self._lock:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def close(self) -> None:
        """See NcclGroupLink."""
        self.abort()
        with self._lock:
            self._connection.close()


def connect(rank: int, host: str, relay: StoreRelay) -> SocketLink:
    """Connect to the other side; the server listens on `host` for this connection. Raise TransferError."""
    try:
        if rank == SERVER:
            return SocketLink(_accept_one(host, relay))
        key, value = relay.next()
        their_host, _, port = value.decode(errors="replace").rpartition(" ")
        if key != ADDRESS or not port.isdecimal():
            raise TransferError("the other side did not name the address of its data port")
        return SocketLink(socket.create_connection((their_host, int(port)), CONNECT_S))
    except (OSError, OverflowError, ValueError) as error:
        raise TransferError(f"cannot connect to the other side's data port: {error}") from error


def _accept_one(host: str, relay: StoreRelay) -> socket.socket:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family, backlog=1) as listener:
        listener.setblocking(False)
        relay.put(ADDRESS, f"{host} {listener.getsockname()[1]}".encode())
        relay.await_connection(listener)
        return listener.accept()[0]


def _time(seconds: float) -> bytes:
    """Return the kernel's form of a time, at least one microsecond."""
    return _TIME.pack(*divmod(max(1, int(seconds * 1e6)), 1_000_000))


def _pieces(data: Any) -> HostPieces:
    return data if isinstance(data, HostPieces) else HostPieces.of(data)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (BlockingIOError, TimeoutError) as error:
        raise TransferError("the other side took or sent nothing in time") from error
    except OSError as error:
        raise TransferError(f"the connection for KV broke: {error}") from error
