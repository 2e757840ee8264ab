"""Contract of snapshot transports: all parts in order, or an error that says whether a retry helps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from kvasir.core.errors import CapacityError, ProtocolError
from kvasir.core.kv import KvSnapshotPart
from kvasir.ports.session import ConnectionLost, Dialer, WorkerConnection
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_router.sessions.grpc_transport import GrpcDialer, GrpcDialLimits
from kvasir_workers.server.grpc_server import GrpcServer

TOKEN = "s3cret"
PARTS = [KvSnapshotPart(3, 7, bytes([number]) * 64, number == 39) for number in range(40)]

MakeParts = Callable[[], AsyncGenerator[KvSnapshotPart, None]]


@dataclass
class Transport:
    """One adapter under test. `serve` returns an address that the dialer reaches."""

    serve: Callable[[MakeParts], Awaitable[str]]
    dialer: Dialer
    nowhere: str


async def nobody(_connection: WorkerConnection) -> None:
    """No session is wanted here."""


async def _memory() -> AsyncIterator[Transport]:
    network = MemoryNetwork()

    async def serve(make: MakeParts) -> str:
        network.listen("worker", nobody, make)
        return "worker"

    yield Transport(serve, network, "nobody")
    await network.close()


async def _grpc() -> AsyncIterator[Transport]:
    servers: list[GrpcServer] = []

    async def serve(make: MakeParts) -> str:
        server = GrpcServer(nobody, bind="127.0.0.1:0", token=TOKEN, snapshot=make)
        servers.append(server)
        return f"127.0.0.1:{await server.start()}"

    yield Transport(serve, GrpcDialer(TOKEN, GrpcDialLimits(part_timeout_s=5.0)), "127.0.0.1:1")
    for server in servers:
        await server.stop(0)


@pytest.fixture(params=[_memory, _grpc], ids=["memory", "grpc"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    async for one in request.param():
        yield one


async def all_parts() -> AsyncGenerator[KvSnapshotPart, None]:
    for part in PARTS:
        yield part


async def take(dialer: Dialer, address: str) -> list[KvSnapshotPart]:
    return [part async for part in dialer.snapshot(address, 3)]


async def test_all_parts_arrive_in_order(transport: Transport) -> None:
    assert await take(transport.dialer, await transport.serve(all_parts)) == PARTS


async def test_a_worker_without_a_record_is_not_worth_asking_again(transport: Transport) -> None:
    async def refuse() -> AsyncGenerator[KvSnapshotPart, None]:
        raise ProtocolError("no record is kept")
        yield

    address = await transport.serve(refuse)
    with pytest.raises(ProtocolError, match="no record is kept"):
        await take(transport.dialer, address)


@pytest.mark.parametrize("before", [0, 5])
async def test_a_worker_that_lost_track_is_to_be_asked_later_and_says_why(
    transport: Transport, before: int
) -> None:
    async def break_off() -> AsyncGenerator[KvSnapshotPart, None]:
        for part in PARTS[:before]:
            yield part
        raise CapacityError("the event ring has overflowed")

    address = await transport.serve(break_off)
    found: list[KvSnapshotPart] = []

    async def read() -> None:
        async with aclosing(transport.dialer.snapshot(address, 3)) as parts:
            async for part in parts:
                found.append(part)

    with pytest.raises(ConnectionLost, match="the event ring has overflowed"):
        await read()
    assert found == PARTS[:before]


async def test_where_nobody_listens_the_connection_is_lost(transport: Transport) -> None:
    with pytest.raises(ConnectionLost):
        await take(transport.dialer, transport.nowhere)


async def test_a_reader_that_gives_up_half_way_ends_the_workers_side_too(transport: Transport) -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[KvSnapshotPart, None]:
        try:
            while True:
                yield PARTS[0]
                await asyncio.sleep(0)
        finally:
            ended.set()

    address = await transport.serve(endless)
    async with aclosing(transport.dialer.snapshot(address, 3)) as parts:
        assert await anext(parts) == PARTS[0]
    async with asyncio.timeout(10):
        await ended.wait()


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_over_grpc_a_wrong_token_gets_no_snapshot(token: str | None) -> None:
    server = GrpcServer(nobody, bind="127.0.0.1:0", token=TOKEN, snapshot=all_parts)
    address = f"127.0.0.1:{await server.start()}"
    with pytest.raises(ProtocolError, match="token is missing or wrong") as caught:
        await take(GrpcDialer(token), address)
    assert caught.value.code == "unauthenticated"
    await server.stop(0)


async def test_over_grpc_a_part_that_does_not_come_in_time_is_a_lost_connection() -> None:
    held = asyncio.Event()

    async def stall() -> AsyncGenerator[KvSnapshotPart, None]:
        yield PARTS[0]
        await held.wait()

    server = GrpcServer(nobody, bind="127.0.0.1:0", token=TOKEN, snapshot=stall)
    address = f"127.0.0.1:{await server.start()}"
    with pytest.raises(ConnectionLost, match=r"sent no part of its snapshot in 0\.1 s"):
        await take(GrpcDialer(TOKEN, GrpcDialLimits(part_timeout_s=0.1)), address)
    await server.stop(0)
