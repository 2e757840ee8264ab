"""A TCP proxy with network faults: delay, throttle, slice, stall, cut, reset, refuse.

The kernel's tools for this (netem, packet filters) are missing on many machines and need root. A proxy works
everywhere and counts what it did, so that a test can prove that its fault happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

from kvasir.ports.clock import Clock, Rng

Direction = Literal["upstream", "downstream"]
UPSTREAM: Direction = "upstream"
DOWNSTREAM: Direction = "downstream"

_READ_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Link:
    """How bytes travel in one direction.

    Every piece arrives `delay_s` plus up to `jitter_s` late, in order, at `bytes_per_s` in total (0:
    unlimited), in writes of at most `slice_bytes` (0: as received). After `cut_after` more bytes of all
    connections together, the connection that carried the last of them is reset.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0
    cut_after: int | None = None


@dataclass(slots=True)
class Counts:
    """Counters. `stalls`: pieces of data and connections that a stall held back."""

    connections: int = 0
    upstream_bytes: int = 0
    downstream_bytes: int = 0
    writes: int = 0
    delayed: int = 0
    stalls: int = 0
    resets: int = 0
    refusals: int = 0
    cuts: int = 0


@dataclass(slots=True)
class _Way:
    """The state of one direction, shared by all connections."""

    link: Link = field(default_factory=Link)
    free_at: float = 0.0
    left: int | None = None


class TcpProxy:
    """Listens on `listen_host` and forwards to `target`, `host:port`. Start, change and close it on one event
    loop. Each direction of a connection buffers about `buffer_bytes` at most. `heard` gets all data."""

    def __init__(
        self,
        target: str,
        *,
        clock: Clock,
        rng: Rng,
        listen_host: str = "127.0.0.1",
        buffer_bytes: int = 1 << 20,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.clock = clock
        self.rng = rng
        self.counts = Counts()
        self.buffer_bytes = buffer_bytes
        self.heard: Callable[[Direction, bytes], None] = lambda _direction, _data: None
        self._listen = (listen_host, 0)
        self._ways: dict[Direction, _Way] = {UPSTREAM: _Way(), DOWNSTREAM: _Way()}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> str:
        """Listen; return the address as `host:port`."""
        await self._open()
        return self.address

    @property
    def address(self) -> str:
        """Its address, `host:port`; unchanged while it refuses connections."""
        return f"{self._listen[0]}:{self._listen[1]}"

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._pairs)

    # -- faults ------------------------------------------------------------------------------------

    def shape(self, direction: Direction, link: Link) -> None:
        """Apply these settings to new bytes; bytes in transit keep their times."""
        way = self._ways[direction]
        way.link, way.left, way.free_at = link, link.cut_after, 0.0

    def stall(self) -> None:
        """Pass nothing more in either direction, and accept connections without serving them: to both ends
        the peer is silent."""
        self._flowing.clear()

    def resume(self) -> None:
        """End a stall, and deliver what was held back."""
        self._flowing.set()

    def reset(self) -> int:
        """Send RST to both ends of every connection; return the number of connections."""
        pairs = [pair for pair in self._pairs.values() if pair]
        for pair in pairs:
            self._reset_pair(pair)
        self.counts.resets += len(pairs)
        return len(pairs)

    async def refuse(self) -> None:
        """Refuse new connections by closing the listening socket. Existing connections stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self.counts.refusals += 1

    async def accept(self) -> None:
        """Accept connections again, on the same port. Raise OSError if the port is taken."""
        if self._server is None:
            await self._open()

    async def close(self) -> None:
        """Cut all connections; no task and no socket remains. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._pairs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- for the pipes of a connection -------------------------------------------------------------

    async def flowing(self) -> None:
        """Return when no stall is active."""
        if not self._flowing.is_set():
            self.counts.stalls += 1
            await self._flowing.wait()

    def due(self, direction: Direction, size: int) -> float:
        """The time at which a piece of that size arrives at the other end."""
        way, now = self._ways[direction], self.clock.now()
        link = way.link
        if link.bytes_per_s:
            way.free_at = max(way.free_at, now) + size / link.bytes_per_s
        late = link.delay_s + (link.jitter_s * self.rng.random() if link.jitter_s else 0.0)
        at = max(way.free_at, now) + late
        self.counts.delayed += at > now
        return at

    def slice_bytes(self, direction: Direction) -> int:
        """The largest write in that direction."""
        return self._ways[direction].link.slice_bytes or self.buffer_bytes

    def allow(self, direction: Direction, size: int) -> int:
        """The number of bytes, at most `size`, that may pass before the connection is cut."""
        left = self._ways[direction].left
        return size if left is None else min(size, left)

    def passed(self, direction: Direction, size: int) -> bool:
        """Count forwarded bytes; return whether to cut the connection here."""
        self.counts.writes += 1
        if direction == UPSTREAM:
            self.counts.upstream_bytes += size
        else:
            self.counts.downstream_bytes += size
        way = self._ways[direction]
        if way.left is None:
            return False
        way.left -= size
        if way.left > 0:
            return False
        way.left = None
        self.counts.cuts += 1
        return True

    # -- inside ------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, *self._listen, limit=_READ_BYTES)
        address = self._server.sockets[0].getsockname()
        self._listen = (address[0], address[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served by a task")
        self.counts.connections += 1
        pair = self._pairs[task] = [writer]
        try:
            await self.flowing()
            await self._forward(reader, writer, pair)
        except (OSError, asyncio.CancelledError):
            # The target refuses, or the proxy closes: the client's connection is reset.
            self._reset_pair(pair)
        finally:
            del self._pairs[task]
            for each in pair:
                each.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: list[asyncio.StreamWriter]
    ) -> None:
        their_reader, their_writer = await asyncio.open_connection(*self._target, limit=_READ_BYTES)
        pair.append(their_writer)
        for each in pair:
            _set_option(each, socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up = _Pipe(self, UPSTREAM, reader, their_writer)
        down = _Pipe(self, DOWNSTREAM, their_reader, writer)
        pipes = [asyncio.ensure_future(pipe.run()) for pipe in (up, down)]
        try:
            for ended in asyncio.as_completed(pipes):
                if await ended:
                    self._reset_pair(pair)
                    return
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)

    @staticmethod
    def _reset_pair(pair: list[asyncio.StreamWriter]) -> None:
        for writer in pair:
            with contextlib.suppress(OSError):
                _set_option(writer, socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


def _set_option(writer: asyncio.StreamWriter, level: int, option: int, value: int | bytes) -> None:
    """Set a socket option. Raise OSError if the connection is closed."""
    try:
        writer.get_extra_info("socket").setsockopt(level, option, value)
    except ValueError as error:  # uvloop raises this if the descriptor is closed.
        raise OSError(errno.EBADF, "the connection is gone") from error


class _Pipe:
    """One direction of one connection: reads pieces, keeps each until it is due, and writes it."""

    def __init__(
        self,
        proxy: TcpProxy,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._direction = direction
        self._reader = reader
        self._writer = writer
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Event()

    async def run(self) -> bool:
        """Run until the end of the data; return True if the connection must be cut. Raise OSError."""
        taking = asyncio.ensure_future(self._take())
        try:
            return await self._give()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _take(self) -> None:
        last = 0.0
        try:
            while data := await self._reader.read(_READ_BYTES):
                self._proxy.heard(self._direction, data)
                # Jitter delays and never reorders, as with TCP.
                last = max(last, self._proxy.due(self._direction, len(data)))
                await self._room()
                self._put(last, data)
        except ConnectionError:
            self._writer.transport.abort()
        self._put(last, b"")

    def _put(self, due: float, data: bytes) -> None:
        self._pieces.append((due, data))
        self._waiting_bytes += len(data)
        self._changed.set()

    async def _room(self) -> None:
        while self._waiting_bytes >= self._proxy.buffer_bytes:
            self._changed.clear()
            await self._changed.wait()

    async def _give(self) -> bool:
        while True:
            while not self._pieces:
                self._changed.clear()
                await self._changed.wait()
            due, data = self._pieces[0]
            late = due - self._proxy.clock.now()
            if late > 0:
                await self._proxy.clock.sleep(late)
            if not data:
                with contextlib.suppress(OSError, RuntimeError):
                    self._writer.write_eof()
                return False
            if await self._write(data):
                return True
            self._pieces.popleft()
            self._waiting_bytes -= len(data)
            self._changed.set()

    async def _write(self, data: bytes) -> bool:
        size = self._proxy.slice_bytes(self._direction)
        for begin in range(0, len(data), size):
            await self._proxy.flowing()
            piece = data[begin : begin + size]
            piece = piece[: self._proxy.allow(self._direction, len(piece))]
            self._writer.write(piece)
            await self._writer.drain()
            if self._proxy.passed(self._direction, len(piece)):
                return True
        return False
