"""Connections of sessions inside one event loop: bounded, deterministic, and broken on request.

It keeps the contract of the gRPC transport (see kvasir.ports.session). A simulation chooses the frame at
which a connection breaks, and the conditions of the network.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvasir.core.errors import CapacityError, ProtocolError
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.core.session_link import payload_bytes
from kvasir.ports.session import ConnectionLost, WorkerConnection
from kvasir_platform.sim.core.process import SimProcess
from kvasir_platform.sim.net.wire import LinkConditions, SimWire

_HEADER_BYTES = 16

OnConnection = Callable[[WorkerConnection], Coroutine[Any, Any, None]]
OnSnapshot = Callable[[], AsyncGenerator[KvSnapshotPart, None]]


class MemoryRouterConnection:
    """`kvasir.ports.session.RouterConnection` in memory."""

    def __init__(self, network: MemoryNetwork, wire: SimWire, welcome: Welcome) -> None:
        self._network = network
        self._wire = wire
        self._welcome = welcome

    @property
    def welcome(self) -> Welcome:
        return self._welcome

    async def send(self, frame: RouterFrame) -> None:
        await self._wire.to_worker.put(frame, _size(frame))
        self._network.passed(self._wire)

    async def receive(self) -> WorkerFrame:
        frame = await self._wire.to_router.get()
        self._network.passed(self._wire)
        return frame

    async def close(self) -> None:
        self._wire.leave_router("closed")


class MemoryWorkerConnection:
    """`kvasir.ports.session.WorkerConnection` in memory. While `process` is stopped, nothing is sent and
    nothing that arrived is read."""

    def __init__(self, network: MemoryNetwork, wire: SimWire, process: SimProcess | None) -> None:
        self._network = network
        self._wire = wire
        self._process = process

    @property
    def hello(self) -> Hello:
        return self._wire.hello

    async def accept(self, welcome: Welcome) -> None:
        await self._runs()
        await self._wire.answer.put(welcome)
        self._network.passed(self._wire)

    async def refuse(self, reason: str) -> None:
        await self._runs()
        self._wire.refusal = reason
        self._wire.leave_worker("refused")

    async def send(self, frame: WorkerFrame) -> None:
        await self._runs()
        try:
            await self._wire.to_router.put(frame, _size(frame))
        finally:
            await self._runs()
        self._network.passed(self._wire)

    async def receive(self) -> RouterFrame:
        try:
            frame = await self._wire.to_worker.get()
        finally:
            await self._runs()
        self._network.passed(self._wire)
        return frame

    async def close(self) -> None:
        self._wire.leave_worker("closed")

    async def _runs(self) -> None:
        if self._process is not None:
            await self._process.runs()


def _size(frame: RouterFrame | WorkerFrame) -> int:
    return _HEADER_BYTES + (0 if frame.payload is None else payload_bytes(frame.payload))


@dataclass
class SnapshotFaults:
    """Conditions of an address's snapshots. `refusal` is the worker's final answer. The next snapshots break
    after the numbers of parts in `cuts`, one each; `gate` blocks every part until it is set."""

    refusal: str | None = None
    cuts: deque[int] = field(default_factory=deque)
    gate: asyncio.Event | None = None


@dataclass
class _Listener:
    """The listener at an address."""

    on_connection: OnConnection
    on_snapshot: OnSnapshot | None
    process: SimProcess | None


class MemoryNetwork:
    """Addresses, and connections to them: a Dialer whose connections tests can break.

    `capacity` frames fit in each direction of a connection; more wait for the reader. A dial takes at most
    `connect_timeout_s` and each part of a snapshot `part_timeout_s`, as over gRPC. A passage is a frame
    handed over by its sender or taken by its receiver, or a Welcome given; `passages` counts them.
    """

    def __init__(
        self, capacity: int = 16, *, connect_timeout_s: float = 1.0, part_timeout_s: float = 5.0
    ) -> None:
        self.passages = 0
        self._capacity = capacity
        self._connect_timeout_s = connect_timeout_s
        self._part_timeout_s = part_timeout_s
        self._listeners: dict[str, _Listener] = {}
        self._faults: dict[str, SnapshotFaults] = {}
        self._weathers: dict[tuple[str, str | None], LinkConditions] = {}
        self._banned: set[str] = set()
        self._wires: dict[asyncio.Task[None], SimWire] = {}
        self._cut_at: int | None = None

    def listen(
        self,
        address: str,
        on_connection: OnConnection,
        on_snapshot: OnSnapshot | None = None,
        process: SimProcess | None = None,
    ) -> None:
        """Serve `address`: each connection that has sent Hello gets a task of `on_connection`, and ends with
        it. `on_snapshot` makes the parts of a snapshot, and raises CapacityError if it temporarily cannot;
        None if no record is kept. `process` is where they run, if it can be stopped. Replaces an earlier
        listener."""
        self._listeners[address] = _Listener(on_connection, on_snapshot, process)

    def unlisten(self, address: str) -> None:
        """Stop listening at `address`; connections stay."""
        self._listeners.pop(address, None)

    def snapshot_faults(self, address: str) -> SnapshotFaults:
        """Return the snapshot conditions of this address."""
        return self._faults.setdefault(address, SnapshotFaults())

    def weather(self, address: str, router_id: str | None = None) -> LinkConditions:
        """Return the network conditions to `address`: for all, or for one router in addition."""
        return self._weathers.setdefault((address, router_id), LinkConditions())

    def cut(self, address: str | None = None, *, router_id: str | None = None) -> int:
        """Break every connection (to `address`, of that router), and lose data in transit. Return their
        number."""
        wires = [
            wire
            for wire in self._wires.values()
            if address in (None, wire.address) and router_id in (None, wire.hello.router_id)
        ]
        for wire in wires:
            wire.cut("cut")
        return len(wires)

    def bury(self, router_id: str) -> None:
        """Kill the router's process: its connections break, and it cannot dial again."""
        self._banned.add(router_id)
        self.cut(router_id=router_id)

    def cut_at(self, passage: int) -> None:
        """Break the connection on which passage number `passage` happens, right after it. A frame that was
        only handed over is lost; one that was taken is not."""
        self._cut_at = passage

    def passed(self, wire: SimWire) -> None:
        """Count a passage on `wire`; called by its two ends."""
        self.passages += 1
        if self.passages == self._cut_at:
            wire.cut("cut")

    async def dial(self, address: str, hello: Hello) -> MemoryRouterConnection:
        """Connect and exchange Hello and Welcome; see kvasir.ports.session.Dialer."""
        weathers = (self.weather(address), self.weather(address, hello.router_id))
        wire = SimWire(address, hello, self._capacity, weathers)
        if hello.router_id in self._banned or (wire.up and address not in self._listeners):
            wire.forget()
            raise ConnectionLost(f"nobody listens at {address}")
        task = asyncio.ensure_future(self._arrive(wire))
        self._wires[task] = wire
        task.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return MemoryRouterConnection(self, wire, await wire.answer.get())
        except ConnectionLost:
            if wire.refusal is not None:
                raise ProtocolError(wire.refusal) from None
            raise
        except TimeoutError as error:
            wire.leave_router("the router is gone")
            raise ConnectionLost(f"no answer from {address} in {self._connect_timeout_s:g} s") from error
        except asyncio.CancelledError:
            wire.leave_router("the router is gone")
            raise

    async def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        """See kvasir.ports.session.Dialer."""
        listener = await self._reached(address)
        faults = self.snapshot_faults(address)
        if listener.on_snapshot is None or faults.refusal is not None:
            raise ProtocolError(faults.refusal or "the worker keeps no record of its blocks")
        left = faults.cuts.popleft() if faults.cuts else None
        try:
            async with aclosing(listener.on_snapshot()) as parts:
                async for part in parts:
                    if faults.gate is not None:
                        await faults.gate.wait()
                    if left == 0 or await self._reached(address) is not listener:
                        raise ConnectionLost("cut")
                    left = None if left is None else left - 1
                    yield part
        except CapacityError as error:
            raise ConnectionLost(error.message) from error
        if left is not None:
            raise ConnectionLost("cut")

    async def close(self) -> None:
        """Close every connection and wait for its listener's task. Raises what one of them raised."""
        self._listeners.clear()
        for weather in self._weathers.values():
            weather.set()
        self.cut()
        await asyncio.gather(*self._wires)

    async def _arrive(self, wire: SimWire) -> None:
        """Deliver the Hello, after which the listener takes the connection."""
        await wire.wait_up()
        if lag_s := wire.lag_s():
            await asyncio.sleep(lag_s)
        listener = self._listeners.get(wire.address)
        if listener is not None:
            if listener.process is not None:
                await listener.process.runs()
            if self._listeners.get(wire.address) is listener:
                await listener.on_connection(MemoryWorkerConnection(self, wire, listener.process))

    async def _reached(self, address: str) -> _Listener:
        """Return the listener at `address`, once traffic passes. Raises ConnectionLost."""
        try:
            async with asyncio.timeout(self._part_timeout_s):
                await self.weather(address).wait_up()
                listener = self._listeners.get(address)
                if listener is not None and listener.process is not None:
                    await listener.process.runs()
        except TimeoutError as error:
            raise ConnectionLost(f"{address} sent no part in {self._part_timeout_s:g} s") from error
        if listener is None:
            raise ConnectionLost(f"nobody listens at {address}")
        return listener

    def _ended(self, task: asyncio.Task[None]) -> None:
        wire = self._wires.pop(task)
        wire.leave_worker("the listener has left")
        wire.forget()
