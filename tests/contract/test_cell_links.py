"""Contract of links between cells: messages in order until the link breaks; and who is let in over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.lab.processes import leaves_nothing_open
from tests.kit.sim.cells import CellLinks

from kvasir.clock import MonotonicClock
from kvasir.core.errors import ConfigError, ProtocolError
from kvasir.ports.session import ConnectionLost
from kvasir.wire.tls import TlsFiles, TlsNames, TlsPaths
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.regions.connections import CellConnection, OnCell
from kvasir_platform.regions.grpc_cells import CellTls, GrpcCellDialer, GrpcCellServer

DOMAIN = "kvasir.local"
PEERS = ("kvasir-eu", "kvasir-us")


class Certificates:
    """Routers' certificates of one authority."""

    def __init__(self, folder: Path, name: str = "ours") -> None:
        self._now = time.time()
        self._folder = folder / name
        self._folder.mkdir()
        self._authority = Authority.make(name, self._now - 60, self._now + 3600)
        (self._folder / "ca.pem").write_bytes(self._authority.pem)

    def of(self, deployment: str, role: str = "router") -> CellTls:
        """The certificate of a router, or of a worker, of a deployment."""
        names = TlsNames(DOMAIN, deployment)
        uri, dns = (
            (names.router, names.router_dns)
            if role == "router"
            else (names.worker(role), names.worker_dns(role))
        )
        own = self._folder / f"{deployment}-{role}.pem"
        own.write_bytes(self._authority.certify(uri, dns, self._now - 60, self._now + 3600))
        files = TlsFiles(
            TlsPaths(self._folder / "ca.pem", own, own), uri=uri, dns=dns, wall_time=lambda: self._now
        )
        return CellTls(files, DOMAIN)


@dataclass
class Link:
    """Both ends of one link, and the deployment that the caller has proven."""

    near: CellConnection
    far: CellConnection
    caller: str | None


async def linked(
    listen: Callable[[OnCell], Awaitable[None]], dial: Callable[[], Awaitable[CellConnection]]
) -> Link:
    """Connect the two ends."""
    met: asyncio.Future[tuple[CellConnection, str | None]] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def serve(connection: CellConnection, caller: str | None) -> None:
        met.set_result((connection, caller))
        await done.wait()

    await listen(serve)
    near = await dial()
    await near.send(b"hello")
    far, caller = await met
    assert await far.receive() == b"hello"
    return Link(near, far, caller)


async def over_grpc(stack: AsyncExitStack, server: CellTls | None, client: CellTls | None) -> Link:
    """A link over gRPC from eu to us."""
    address = ""

    async def listen(serve: OnCell) -> None:
        nonlocal address
        made = GrpcCellServer(serve, bind="127.0.0.1:0", peers=PEERS, tls=server)
        stack.push_async_callback(made.stop)
        address = f"127.0.0.1:{await made.start()}"

    async def dial() -> CellConnection:
        connection = await GrpcCellDialer(address, "kvasir-us", client).dial()
        stack.push_async_callback(connection.close)
        return connection

    return await linked(listen, dial)


@pytest.fixture(params=["memory", "grpc", "grpc over TLS"])
async def link(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Link]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            links = CellLinks(MonotonicClock())

            async def listen(serve: OnCell) -> None:
                links.listening["us"] = serve

            made = await linked(listen, lambda: links.dial("eu", "us"))
            yield made
            for task in list(links.serving):
                task.cancel()
        elif request.param == "grpc":
            yield await over_grpc(stack, None, None)
        else:
            issued = Certificates(tmp_path)
            yield await over_grpc(stack, issued.of("kvasir-us"), issued.of("kvasir-eu"))


async def test_messages_arrive_in_order_in_both_directions(link: Link) -> None:
    for number in range(50):
        await link.near.send(b"%d" % number)
        await link.far.send(b"%d" % (1000 + number))
    assert [await link.far.receive() for _ in range(50)] == [b"%d" % number for number in range(50)]
    assert [await link.near.receive() for _ in range(50)] == [b"%d" % (1000 + each) for each in range(50)]


async def test_a_large_message_is_whole(link: Link) -> None:
    data = bytes(4 << 20)
    # A message larger than the window of HTTP/2 is not sent before the other end reads.
    sending = asyncio.ensure_future(link.near.send(data))
    assert await link.far.receive() == data
    await sending


@pytest.mark.parametrize("side", ["near", "far"])
async def test_the_other_end_of_a_closed_link_is_lost(link: Link, side: str) -> None:
    closed, other = (link.near, link.far) if side == "near" else (link.far, link.near)
    waiting = asyncio.ensure_future(other.receive())
    await asyncio.sleep(0)
    if side == "near":
        await closed.close()
        with pytest.raises(ConnectionLost):
            await waiting
    else:
        waiting.cancel()
        own = asyncio.ensure_future(closed.receive())
        await asyncio.sleep(0)
        await closed.close()
        with pytest.raises(ConnectionLost):
            await own
    with pytest.raises(ConnectionLost):
        await closed.receive()


async def test_a_link_that_was_lost_leaves_nothing_open_for_the_garbage_collector() -> None:
    async def hang_up(connection: CellConnection, caller: str | None) -> None:
        return

    server = GrpcCellServer(hang_up, bind="127.0.0.1:0", peers=PEERS, tls=None)
    dialer = GrpcCellDialer(f"127.0.0.1:{await server.start()}", "kvasir-us", None)

    async def fail() -> None:
        link = await dialer.dial()
        with pytest.raises(ConnectionLost):
            await link.receive()
        await link.close()

    await leaves_nothing_open(fail)
    await server.stop()


async def test_the_server_knows_which_deployment_calls(tmp_path: Path) -> None:
    issued = Certificates(tmp_path)
    async with AsyncExitStack() as stack:
        link = await over_grpc(stack, issued.of("kvasir-us"), issued.of("kvasir-eu"))
        assert link.caller == "kvasir-eu"


@pytest.mark.parametrize(
    ("deployment", "role"),
    [("kvasir-mars", "router"), ("kvasir-eu", "decode")],
    ids=["a stranger", "a worker"],
)
async def test_only_routers_of_peers_are_served(tmp_path: Path, deployment: str, role: str) -> None:
    issued = Certificates(tmp_path)
    served: list[CellConnection] = []

    async def serve(connection: CellConnection, _: str | None) -> None:
        served.append(connection)

    server = GrpcCellServer(serve, bind="127.0.0.1:0", peers=PEERS, tls=issued.of("kvasir-us"))
    port = await server.start()
    try:
        link = await GrpcCellDialer(f"127.0.0.1:{port}", "kvasir-us", issued.of(deployment, role)).dial()
        with pytest.raises(ProtocolError, match=r"regions\.peers names no such deployment"):
            await link.receive()
        await link.close()
    finally:
        await server.stop()
    assert served == []


async def test_a_cell_with_another_identity_is_not_trusted(tmp_path: Path) -> None:
    ours, theirs = Certificates(tmp_path), Certificates(tmp_path, "theirs")

    async def serve(connection: CellConnection, _: str | None) -> None:
        raise AssertionError("served")

    for certificate in (ours.of("kvasir-ap"), theirs.of("kvasir-us")):
        server = GrpcCellServer(serve, bind="127.0.0.1:0", peers=PEERS, tls=certificate)
        port = await server.start()
        try:
            with pytest.raises(ConnectionLost, match="no certificate of a router of kvasir-us"):
                await GrpcCellDialer(
                    f"127.0.0.1:{port}", "kvasir-us", ours.of("kvasir-eu"), connect_timeout_s=0.3
                ).dial()
        finally:
            await server.stop()


async def test_nobody_answers_at_a_closed_port() -> None:
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        await GrpcCellDialer("127.0.0.1:1", "kvasir-us", None, connect_timeout_s=0.2).dial()


async def test_an_address_that_is_taken_is_named() -> None:
    async def serve(connection: CellConnection, _: str | None) -> None: ...

    first = GrpcCellServer(serve, bind="127.0.0.1:0", peers=(), tls=None)
    port = await first.start()
    try:
        with pytest.raises(ConfigError, match=r"regions\.listen: cannot listen on 127\.0\.0\.1"):
            await GrpcCellServer(serve, bind=f"127.0.0.1:{port}", peers=(), tls=None).start()
    finally:
        await first.stop()
