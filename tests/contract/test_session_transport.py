"""Contract of session transports: frames arrive in order until the connection breaks, and none afterwards."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from load_tests.scenarios.scorecard.security.tls_trials import Issuers, router_tls, worker_tls
from tests.kit.lab.processes import leaves_nothing_open

from kvasir.core.errors import ConfigError, ProtocolError
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.messages import Abort, Draining, Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.core.requests import Role
from kvasir.ports.session import ConnectionLost, Dialer, RouterConnection, WorkerConnection
from kvasir.wire.codec import SERVICE
from kvasir.wire.v1 import kv_pb2, session_pb2
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_router.sessions.grpc_transport import DialTls, GrpcDialer, GrpcDialLimits
from kvasir_workers.server.grpc_server import GrpcServer, GrpcServerLimits, ServerTls

TOKEN = "s3cret"
IDENTITY = WorkerIdentity(
    worker_id="w",
    epoch=1,
    pool="decode",
    role=Role.DECODE,
    model="m",
    revision="r",
    tokenizer_digest="d",
    max_model_len=128,
    kv=KvLayout(16, "float32", "NHD", 2, 2, 32, 4096),
    kv_blocks=8,
    engine="scripted",
    engine_version="1",
)
HELLO = Hello(router_id="router", session_id="s", received_seq=7)
WELCOME = Welcome("s", True, 5, IDENTITY)

OnConnection = Callable[[WorkerConnection], Coroutine[Any, Any, None]]


@dataclass
class Transport:
    """One adapter under test. `listen` returns an address that the dialer reaches."""

    listen: Callable[[OnConnection], Awaitable[str]]
    dialer: Dialer
    nowhere: str


async def _memory() -> AsyncIterator[Transport]:
    network = MemoryNetwork(capacity=4)

    async def listen(on_connection: OnConnection) -> str:
        network.listen("worker", on_connection)
        return "worker"

    yield Transport(listen, network, "nobody")
    await network.close()


async def _grpc() -> AsyncIterator[Transport]:
    async for one in _over_grpc(None, None):
        yield one


async def _grpc_tls() -> AsyncIterator[Transport]:
    issuers = Issuers(time.time())
    ca = issuers.ours.pem
    async for one in _over_grpc(worker_tls(ca, issuers.worker()), router_tls(ca, issuers.router())):
        yield one


async def _over_grpc(worker: ServerTls | None, router: DialTls | None) -> AsyncIterator[Transport]:
    servers: list[GrpcServer] = []

    async def listen(on_connection: OnConnection) -> str:
        server = GrpcServer(on_connection, bind="127.0.0.1:0", token=TOKEN, tls=worker)
        servers.append(server)
        return f"127.0.0.1:{await server.start()}"

    yield Transport(
        listen, GrpcDialer(TOKEN, GrpcDialLimits(connect_timeout_s=10.0), tls=router), "127.0.0.1:1"
    )
    for server in servers:
        await server.stop(0)


@pytest.fixture(params=[_memory, _grpc, _grpc_tls], ids=["memory", "grpc", "grpc over TLS"])
async def transport(request: pytest.FixtureRequest) -> AsyncIterator[Transport]:
    async for one in request.param():
        yield one


class Worker:
    """Accepts one connection and lets the test act on it."""

    def __init__(self) -> None:
        self._connection: asyncio.Future[WorkerConnection] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()

    async def __call__(self, connection: WorkerConnection) -> None:
        await connection.accept(WELCOME)
        self._connection.set_result(connection)
        await self._done.wait()

    async def connection(self) -> WorkerConnection:
        return await self._connection

    def leave(self) -> None:
        self._done.set()


async def pair(transport: Transport) -> tuple[RouterConnection, WorkerConnection, Worker]:
    worker = Worker()
    address = await transport.listen(worker)
    connection = await transport.dialer.dial(address, HELLO)
    return connection, await worker.connection(), worker


async def test_hello_and_welcome_are_exchanged_before_anything_else(transport: Transport) -> None:
    router, connection, worker = await pair(transport)
    assert connection.hello == HELLO
    assert router.welcome == WELCOME
    worker.leave()
    await router.close()


async def test_frames_arrive_in_order_in_both_directions(transport: Transport) -> None:
    router, connection, worker = await pair(transport)
    for seq in range(1, 4):
        await router.send(RouterFrame(seq, 0, Abort((str(seq),))))
        await connection.send(WorkerFrame(seq, 0, Draining(str(seq), 1.0)))
    assert [(await connection.receive()).seq for _ in range(3)] == [1, 2, 3]
    assert [(await router.receive()).payload for _ in range(3)] == [Draining(str(s), 1.0) for s in (1, 2, 3)]
    worker.leave()
    await router.close()


async def test_the_worker_sees_a_router_that_closes(transport: Transport) -> None:
    router, connection, worker = await pair(transport)
    waiting = asyncio.ensure_future(connection.receive())
    await router.close()
    await router.close()
    with pytest.raises(ConnectionLost):
        await waiting
    with pytest.raises(ConnectionLost):
        await router.send(RouterFrame(1, 0))
    with pytest.raises(ConnectionLost):
        await router.receive()
    worker.leave()


async def test_the_router_sees_a_worker_that_closes(transport: Transport) -> None:
    router, connection, worker = await pair(transport)
    waiting = asyncio.ensure_future(connection.receive())
    await asyncio.sleep(0)
    await connection.close()
    await connection.close()
    with pytest.raises(ConnectionLost):
        await router.receive()
    with pytest.raises(ConnectionLost):
        await waiting
    with pytest.raises(ConnectionLost):
        await connection.send(WorkerFrame(1, 0))
    worker.leave()
    await router.close()


async def test_the_router_sees_a_listener_that_returns(transport: Transport) -> None:
    router, _, worker = await pair(transport)
    worker.leave()
    with pytest.raises(ConnectionLost):
        await router.receive()
    await router.close()


async def test_a_refusal_reaches_the_dialer_with_its_reason(transport: Transport) -> None:
    async def refuse(connection: WorkerConnection) -> None:
        await connection.refuse("no room at the inn")

    address = await transport.listen(refuse)
    with pytest.raises(ProtocolError, match="no room at the inn"):
        await transport.dialer.dial(address, HELLO)


async def test_dialing_where_nobody_listens_is_a_lost_connection(transport: Transport) -> None:
    with pytest.raises(ConnectionLost):
        await transport.dialer.dial(transport.nowhere, HELLO)


async def test_a_dial_that_failed_leaves_nothing_open_for_the_garbage_collector(
    transport: Transport,
) -> None:
    async def hang_up(connection: WorkerConnection) -> None:
        return

    address = await transport.listen(hang_up)

    async def fail() -> None:
        with pytest.raises(ConnectionLost):
            await transport.dialer.dial(address, HELLO)

    await leaves_nothing_open(fail)


async def test_a_slow_reader_holds_up_the_sender_and_loses_nothing(transport: Transport) -> None:
    router, connection, worker = await pair(transport)
    payload = Draining("x" * (1 << 20), 1.0)
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for seq in range(1, 41):
            await connection.send(WorkerFrame(seq, 0, payload))
            sent = seq

    sending = asyncio.ensure_future(send_all())
    first = await router.receive()
    assert first.seq == 1
    assert sent < 40
    assert [(await router.receive()).seq for _ in range(39)] == list(range(2, 41))
    await sending
    worker.leave()
    await router.close()


async def test_a_worker_that_closes_in_the_middle_of_its_welcome_ends_the_connection(
    transport: Transport,
) -> None:
    async def hasty(connection: WorkerConnection) -> None:
        accepting = asyncio.ensure_future(connection.accept(WELCOME))
        await asyncio.sleep(0)
        accepting.cancel()
        await connection.close()

    address = await transport.listen(hasty)

    async def dial_and_receive() -> None:
        await (await transport.dialer.dial(address, HELLO)).receive()

    for _ in range(20):
        with pytest.raises(ConnectionLost) as caught:
            await dial_and_receive()
        assert "no answer" not in str(caught.value)


async def test_a_worker_that_closes_in_the_middle_of_a_send_still_ends_the_connection(
    transport: Transport,
) -> None:
    router, connection, worker = await pair(transport)

    sending = asyncio.ensure_future(connection.send(WorkerFrame(1, 0, Draining("x" * (32 << 20), 1.0))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait((sending,))
    await connection.close()

    async def read_to_the_end() -> None:
        while True:
            await router.receive()

    with pytest.raises(ConnectionLost):
        await read_to_the_end()
    worker.leave()
    await router.close()


async def test_a_cancelled_receive_is_a_cancellation_and_no_lost_connection(transport: Transport) -> None:
    router, connection, worker = await pair(transport)
    for waiting in (asyncio.ensure_future(router.receive()), asyncio.ensure_future(connection.receive())):
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    worker.leave()
    await router.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[GrpcServer, str]]:
    async def accept(connection: WorkerConnection) -> None:
        await connection.accept(WELCOME)
        await connection.receive()

    limits = GrpcServerLimits(max_message_bytes=1 << 16, hello_timeout_s=0.2)
    server = GrpcServer(accept, bind="127.0.0.1:0", token=TOKEN, limits=limits)
    yield server, f"127.0.0.1:{await server.start()}"
    await server.stop(0)


@pytest.mark.parametrize("token", [None, "", "wrong"])
async def test_a_router_without_the_right_token_is_unauthenticated(
    server: tuple[GrpcServer, str], token: str | None
) -> None:
    with pytest.raises(ProtocolError, match="token is missing or wrong") as caught:
        await GrpcDialer(token).dial(server[1], HELLO)
    assert caught.value.code == "unauthenticated"


async def test_a_worker_that_does_not_answer_in_time_is_a_lost_connection() -> None:
    dialer = GrpcDialer(TOKEN, GrpcDialLimits(connect_timeout_s=0.1))
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectionLost, match=r"no answer .* in 0\.1 s"),
    ):
        await dialer.dial(f"127.0.0.1:{silent.getsockname()[1]}", HELLO)


async def test_a_worker_without_a_record_of_its_blocks_says_that_snapshots_are_unimplemented(
    server: tuple[GrpcServer, str],
) -> None:
    async with grpc.aio.insecure_channel(server[1]) as channel:
        snapshot = channel.unary_stream(
            f"/{SERVICE}/Snapshot",
            request_serializer=kv_pb2.SnapshotRequest.SerializeToString,
            response_deserializer=None,
        )
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", f"Bearer {TOKEN}"),), grpc.StatusCode.UNIMPLEMENTED),
        ):
            request = kv_pb2.SnapshotRequest(epoch=1)
            call = snapshot(request, metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is code


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (session_pb2.SessionRequest(frame=session_pb2.RouterFrame()), grpc.StatusCode.INVALID_ARGUMENT),
        (None, grpc.StatusCode.DEADLINE_EXCEEDED),
        (b"x" * (1 << 17), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["noise", "a frame", "silence", "too much"],
)
async def test_whoever_does_not_begin_with_hello_is_turned_away(
    server: tuple[GrpcServer, str], first: Any, code: grpc.StatusCode
) -> None:
    async with grpc.aio.insecure_channel(server[1]) as channel:
        method = channel.stream_stream(
            f"/{SERVICE}/Session", request_serializer=None, response_deserializer=None
        )
        call = method(None, metadata=(("authorization", f"Bearer {TOKEN}"),))
        if first is not None:
            await call.write(first if isinstance(first, bytes) else first.SerializeToString())
        assert await call.code() is code


async def test_health_follows_the_engine(server: tuple[GrpcServer, str]) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_failed() -> str:
        return await died

    async with grpc.aio.insecure_channel(server[1]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str = "") -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        assert await status() == not_serving
        following = asyncio.ensure_future(server[0].follow(wait_failed))
        await asyncio.sleep(0)
        assert await status() == await status(SERVICE) == serving
        died.set_result("out of memory")
        assert await following == "out of memory"
        assert await status() == await status(SERVICE) == not_serving


async def test_a_taken_port_is_a_config_error(server: tuple[GrpcServer, str]) -> None:
    async def nobody(_connection: WorkerConnection) -> None: ...

    second = GrpcServer(nobody, bind=server[1], token=None)
    with pytest.raises(ConfigError, match="cannot listen"):
        await second.start()
    await second.stop(0)
