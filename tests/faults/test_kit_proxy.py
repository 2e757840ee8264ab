"""Each fault of the proxy is shown to happen, on real sockets and under a clock that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
from tests.kit.lab.proxy import DOWNSTREAM, UPSTREAM, Link, TcpProxy


class HandClock:
    """Time moves when the test says so."""

    def __init__(self) -> None:
        self._now = 100.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self.slept = asyncio.Event()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._sleepers.append((self._now + seconds, event))
        self.slept.set()
        await event.wait()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [each for each in self._sleepers if each[0] <= self._now + 1e-9]
        self._sleepers = [each for each in self._sleepers if each not in due]
        for _, event in due:
            event.set()


class Echo:
    """Answers every byte with itself; `sizes` are the reads."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.broken = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while data := await reader.read(1 << 16):
                self.sizes.append(len(data))
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            self.broken.set()
        finally:
            writer.close()
            self._tasks.discard(task)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    server = Echo()
    yield server
    await server.stop()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def proxy(echo: Echo, clock: HandClock) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(await echo.start(), clock=clock, rng=Random(1), buffer_bytes=1 << 16) as made:
        yield made


async def dial(proxy: TcpProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_without_faults_bytes_pass_and_are_counted(proxy: TcpProxy) -> None:
    reader, writer = await dial(proxy)
    writer.write(b"x" * 1000)
    assert await reader.readexactly(1000) == b"x" * 1000
    assert (proxy.counts.connections, proxy.counts.upstream_bytes) == (1, 1000)
    assert proxy.counts.downstream_bytes == 1000
    writer.close()
    assert await reader.read() == b""


async def test_a_half_closed_connection_still_answers(proxy: TcpProxy) -> None:
    reader, writer = await dial(proxy)
    writer.write(b"last words")
    writer.write_eof()
    assert await reader.read() == b"last words"
    writer.close()


async def test_a_delay_holds_every_byte_until_its_time(proxy: TcpProxy, clock: HandClock) -> None:
    proxy.shape(DOWNSTREAM, Link(delay_s=0.2))
    reader, writer = await dial(proxy)
    writer.write(b"late")
    answer = asyncio.ensure_future(reader.readexactly(4))
    await clock.slept.wait()
    clock.advance(0.19)
    assert not answer.done()
    assert proxy.counts.downstream_bytes == 0
    clock.advance(0.01)
    assert await answer == b"late"
    assert proxy.counts.delayed == 1
    writer.close()


async def test_jitter_comes_from_the_seed_and_keeps_the_order(clock: HandClock) -> None:
    def dues(seed: int) -> list[float]:
        proxy = TcpProxy("127.0.0.1:1", clock=clock, rng=Random(seed))
        proxy.shape(UPSTREAM, Link(delay_s=0.1, jitter_s=0.4))
        return [proxy.due(UPSTREAM, 10) for _ in range(20)]

    assert dues(3) == dues(3)
    assert dues(3) != dues(4)
    assert all(100.1 <= due <= 100.5 for due in dues(3))


async def test_bandwidth_is_shared_by_all_connections_of_a_direction(clock: HandClock) -> None:
    proxy = TcpProxy("127.0.0.1:1", clock=clock, rng=Random(1))
    proxy.shape(UPSTREAM, Link(bytes_per_s=1000.0))
    assert [round(proxy.due(UPSTREAM, 500) - clock.now(), 6) for _ in range(3)] == [0.5, 1.0, 1.5]
    clock.advance(10.0)
    assert round(proxy.due(UPSTREAM, 500) - clock.now(), 6) == 0.5


async def test_slicing_makes_many_small_writes_of_the_same_bytes(proxy: TcpProxy) -> None:
    proxy.shape(UPSTREAM, Link(slice_bytes=3))
    reader, writer = await dial(proxy)
    writer.write(bytes(range(100)))
    assert await reader.readexactly(100) == bytes(range(100))
    assert proxy.counts.writes >= 34
    writer.close()


async def test_a_stall_is_silence_and_nothing_of_it_is_lost(proxy: TcpProxy) -> None:
    reader, writer = await dial(proxy)
    writer.write(b"a")
    assert await reader.readexactly(1) == b"a"
    proxy.stall()
    writer.write(b"b")
    answer = asyncio.ensure_future(reader.readexactly(1))
    second_reader, second_writer = await dial(proxy)
    second_writer.write(b"c")
    while proxy.counts.stalls < 2:
        await asyncio.sleep(0)
    assert not answer.done()
    assert proxy.counts.upstream_bytes == 1
    proxy.resume()
    assert await answer == b"b"
    assert await second_reader.readexactly(1) == b"c"
    writer.close()
    second_writer.close()


async def test_a_reset_breaks_both_ends(proxy: TcpProxy, echo: Echo) -> None:
    reader, writer = await dial(proxy)
    writer.write(b"a")
    await reader.readexactly(1)
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    await asyncio.wait_for(echo.broken.wait(), 5.0)
    assert proxy.counts.resets == 1
    writer.close()


async def test_a_cut_comes_after_exactly_so_many_bytes(proxy: TcpProxy) -> None:
    proxy.shape(UPSTREAM, Link(cut_after=70_000))
    reader, writer = await dial(proxy)
    writer.write(b"x" * 200_000)
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(200_000)
    assert (proxy.counts.upstream_bytes, proxy.counts.cuts) == (70_000, 1)
    writer.close()
    again, other = await dial(proxy)
    other.write(b"next")
    assert await again.readexactly(4) == b"next"
    other.close()


async def test_refused_connections_are_refused_by_the_kernel_and_the_port_comes_back(proxy: TcpProxy) -> None:
    reader, writer = await dial(proxy)
    writer.write(b"a")
    await reader.readexactly(1)
    address = proxy.address
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await dial(proxy)
    writer.write(b"b")
    assert await reader.readexactly(1) == b"b"
    await proxy.accept()
    assert proxy.address == address
    _, again = await dial(proxy)
    again.close()
    writer.close()


async def test_what_waits_in_the_proxy_is_bounded(proxy: TcpProxy) -> None:
    reader, writer = await dial(proxy)
    writer.write(b"a")
    await reader.readexactly(1)
    proxy.stall()
    block = b"x" * (1 << 20)
    for _ in range(64):
        writer.write(block)
    transport = writer.transport
    waiting, unchanged = transport.get_write_buffer_size(), 0
    while unchanged < 2000:
        await asyncio.sleep(0)
        left = transport.get_write_buffer_size()
        unchanged = unchanged + 1 if left == waiting else 0
        waiting = left
    # The rest is in the proxy's buffer and in the kernel's.
    assert waiting > 48 << 20
    transport.abort()


async def test_a_target_that_refuses_breaks_the_clients_connection(clock: HandClock) -> None:
    async with TcpProxy("127.0.0.1:1", clock=clock, rng=Random(1)) as proxy:
        reader, writer = await dial(proxy)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()


async def test_closing_leaves_no_task(proxy: TcpProxy) -> None:
    before = len(asyncio.all_tasks())
    pairs = [await dial(proxy) for _ in range(5)]
    for reader, writer in pairs:
        writer.write(b"a")
        await reader.readexactly(1)
    await proxy.close()
    for reader, writer in pairs:
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
    assert proxy.connections == 0
    await asyncio.sleep(0)
    # What is left are the echo server's own ends.
    assert len(asyncio.all_tasks()) <= before + 5
