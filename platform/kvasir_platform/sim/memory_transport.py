"""Sessions' connections inside one event loop: bounded, deterministic, and broken at will.

It keeps the contract of the gRPC transport (see kvasir.ports.session), so that whatever runs over it runs
over a network; a simulation decides on which frame a connection breaks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvasir.core.errors import CapacityError, ProtocolError
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.ports.session import ConnectionLost, WorkerConnection

T = TypeVar("T")

OnConnection = Callable[[WorkerConnection], Coroutine[Any, Any, None]]
OnSnapshot = Callable[[], AsyncGenerator[KvSnapshotPart, None]]


class _Pipe(Generic[T]):
    """One direction of a connection, holding at most `capacity` frames."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frames: deque[T] = deque()
        self._broken: str | None = None
        self._changed = asyncio.Event()

    def end(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._frames.clear()
        self._changed.set()

    async def put(self, frame: T) -> None:
        while self._broken is None and len(self._frames) >= self._capacity:
            await self._change()
        self._raise_if_broken()
        self._frames.append(frame)
        self._changed.set()

    async def get(self) -> T:
        while self._broken is None and not self._frames:
            await self._change()
        self._raise_if_broken()
        self._changed.set()
        return self._frames.popleft()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise ConnectionLost(self._broken)


class _Wire:
    """What the two ends of one connection share."""

    def __init__(self, network: MemoryNetwork, address: str, hello: Hello, capacity: int) -> None:
        self.network = network
        self.address = address
        self.hello = hello
        self.to_worker: _Pipe[RouterFrame] = _Pipe(capacity)
        self.to_router: _Pipe[WorkerFrame] = _Pipe(capacity)
        self.answer: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()

    def end(self, reason: str, refusal: str | None = None) -> None:
        if not self.answer.done():
            error = ConnectionLost(reason) if refusal is None else ProtocolError(refusal)
            self.answer.set_exception(error)
            # A dialer that has given up no longer asks.
            self.answer.exception()
        self.to_worker.end(reason)
        self.to_router.end(reason)


class MemoryRouterConnection:
    """`kvasir.ports.session.RouterConnection` in memory."""

    def __init__(self, wire: _Wire, welcome: Welcome) -> None:
        self._wire = wire
        self._welcome = welcome

    @property
    def welcome(self) -> Welcome:
        return self._welcome

    async def send(self, frame: RouterFrame) -> None:
        await self._wire.to_worker.put(frame)
        self._wire.network.passed(self._wire)

    async def receive(self) -> WorkerFrame:
        frame = await self._wire.to_router.get()
        self._wire.network.passed(self._wire)
        return frame

    async def close(self) -> None:
        self._wire.end("closed")


class MemoryWorkerConnection:
    """`kvasir.ports.session.WorkerConnection` in memory."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    @property
    def hello(self) -> Hello:
        return self._wire.hello

    async def accept(self, welcome: Welcome) -> None:
        if self._wire.answer.done():
            raise ConnectionLost("the router is gone")
        self._wire.answer.set_result(welcome)
        self._wire.network.passed(self._wire)

    async def refuse(self, reason: str) -> None:
        self._wire.end("refused", refusal=reason)

    async def send(self, frame: WorkerFrame) -> None:
        await self._wire.to_router.put(frame)
        self._wire.network.passed(self._wire)

    async def receive(self) -> RouterFrame:
        frame = await self._wire.to_worker.get()
        self._wire.network.passed(self._wire)
        return frame

    async def close(self) -> None:
        self._wire.end("closed")


@dataclass
class SnapshotFaults:
    """What happens to an address's snapshots from here on. `refusal` is the worker's final word. The next
    snapshots break after as many parts as `cuts` says, one number for each; `gate` holds up every part
    until it is set."""

    refusal: str | None = None
    cuts: deque[int] = field(default_factory=deque)
    gate: asyncio.Event | None = None


class MemoryNetwork:
    """Addresses, and connections to them: a Dialer that tests hold the scissors of.

    `capacity` frames fit in each direction of a connection; more wait for the reader. A passage is a
    frame handed over by its sender or taken by its receiver, or a Welcome given; `passages` counts them.
    """

    def __init__(self, capacity: int = 16) -> None:
        self.passages = 0
        self._capacity = capacity
        self._listeners: dict[str, OnConnection] = {}
        self._snapshots: dict[str, OnSnapshot] = {}
        self._faults: dict[str, SnapshotFaults] = {}
        self._wires: dict[asyncio.Task[None], _Wire] = {}
        self._cut_at: int | None = None

    def listen(
        self, address: str, on_connection: OnConnection, on_snapshot: OnSnapshot | None = None
    ) -> None:
        """Serve `address`: each connection that has said Hello gets a task of `on_connection`, and ends
        with it. `on_snapshot` makes the parts of a snapshot, raising CapacityError when it cannot for the
        time being; None where no record is kept. Replaces an earlier listener."""
        self._listeners[address] = on_connection
        self._snapshots.pop(address, None)
        if on_snapshot is not None:
            self._snapshots[address] = on_snapshot

    def unlisten(self, address: str) -> None:
        """Nobody answers at `address` from here on; connections stay."""
        self._listeners.pop(address, None)
        self._snapshots.pop(address, None)

    def snapshot_faults(self, address: str) -> SnapshotFaults:
        """The scissors for this address's snapshots."""
        return self._faults.setdefault(address, SnapshotFaults())

    def cut(self, address: str | None = None) -> int:
        """Break every connection (to `address`), losing what is under way; returns how many."""
        wires = [wire for wire in self._wires.values() if address in (None, wire.address)]
        for wire in wires:
            wire.end("cut")
        return len(wires)

    def cut_at(self, passage: int) -> None:
        """Break the connection on which passage number `passage` happens, right after it. A frame that
        was only handed over is lost; one that was taken is not."""
        self._cut_at = passage

    def passed(self, wire: _Wire) -> None:
        """Count a passage on `wire`; called by its two ends."""
        self.passages += 1
        if self.passages == self._cut_at:
            wire.end("cut")

    async def dial(self, address: str, hello: Hello) -> MemoryRouterConnection:
        """Connect and exchange Hello and Welcome; see kvasir.ports.session.Dialer."""
        on_connection = self._listeners.get(address)
        if on_connection is None:
            raise ConnectionLost(f"nobody listens at {address}")
        wire = _Wire(self, address, hello, self._capacity)
        task = asyncio.ensure_future(on_connection(MemoryWorkerConnection(wire)))
        self._wires[task] = wire
        task.add_done_callback(self._ended)
        try:
            return MemoryRouterConnection(wire, await wire.answer)
        except asyncio.CancelledError:
            wire.end("the router is gone")
            raise

    async def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        """See kvasir.ports.session.Dialer."""
        if address not in self._listeners:
            raise ConnectionLost(f"nobody listens at {address}")
        faults = self.snapshot_faults(address)
        on_snapshot = self._snapshots.get(address)
        if on_snapshot is None or faults.refusal is not None:
            raise ProtocolError(faults.refusal or "the worker keeps no record of its blocks")
        left = faults.cuts.popleft() if faults.cuts else None
        try:
            async with aclosing(on_snapshot()) as parts:
                async for part in parts:
                    if faults.gate is not None:
                        await faults.gate.wait()
                    if left == 0 or self._snapshots.get(address) is not on_snapshot:
                        raise ConnectionLost("cut")
                    left = None if left is None else left - 1
                    yield part
        except CapacityError as error:
            raise ConnectionLost(error.message) from error
        if left is not None:
            raise ConnectionLost("cut")

    async def close(self) -> None:
        """End every connection and wait for its listener's task. Raises what one of them raised."""
        self._listeners.clear()
        self.cut()
        await asyncio.gather(*self._wires)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._wires.pop(task).end("the listener has left")
