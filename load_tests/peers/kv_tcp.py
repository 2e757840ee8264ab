"""Raw TCP on the loopback interface: `sendall` from one process's memory, `recv_into` another's. The bytes
are contiguous on both sides, so nothing is gathered or scattered: the limit of a socket."""

from __future__ import annotations

import socket
import time

from load_tests.scenarios.kv_parts.memory import Case, Memory


class Source:
    """Sends on request."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        self._bytes = memoryview(b"")
        self._memory: Memory | None = None

    def prepare(self, case: Case, seed: int) -> int:
        """Allocate a case's bytes; return the port to connect to."""
        self._memory = Memory(case, seed)
        self._bytes = self._memory.layers.data.cast("B")[: case.total]
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self) -> None:
        """Accept the connection of the sink."""
        self.close()
        self._connection = self._listener.accept()[0]
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        """Wait for a request, and send everything."""
        if self._connection is None or not self._connection.recv(1):
            raise RuntimeError("no sink")
        self._connection.sendall(self._bytes)

    def first_and_last(self) -> bytes:
        """A sample of the bytes, to verify them."""
        return bytes(self._bytes[:4096]) + bytes(self._bytes[-4096:])

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Sink:
    """Requests and receives."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._bytes = memoryview(b"")
        self._memory: Memory | None = None

    def prepare(self, case: Case, port: int) -> None:
        """Allocate the buffer of a case, and connect."""
        self.close()
        self._memory = Memory(case, None)
        self._bytes = self._memory.layers.data.cast("B")[: case.total]
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> float:
        """Return the seconds from the request to the last byte."""
        if self._connection is None:
            raise RuntimeError("not connected")
        began = time.perf_counter()
        self._connection.sendall(b"?")
        at, total = 0, len(self._bytes)
        while at < total:
            count = self._connection.recv_into(self._bytes[at:])
            if not count:
                raise RuntimeError("the source hung up")
            at += count
        return time.perf_counter() - began

    def first_and_last(self) -> bytes:
        """See Source."""
        return bytes(self._bytes[:4096]) + bytes(self._bytes[-4096:])

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
