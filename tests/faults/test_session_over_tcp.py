"""A real TCP reset between a router and a worker, over gRPC: the streams continue."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from kvasir_router.sessions.grpc_transport import GrpcDialer
from kvasir_router.sessions.session import SessionInterrupted, SessionLost, SessionReady
from kvasir_workers.server.grpc_server import GrpcServer

TOKEN = "s3cret"


class TcpProxy:
    """Forwards connections to one port, and resets them all on `reset`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def reset(self) -> int:
        """RST to both ends of every connection; returns how many ends."""
        writers = [writer for writer in self._writers if not writer.is_closing()]
        for writer in writers:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return len(writers)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target)
        pair = {writer, upstream_writer}
        self._writers |= pair
        try:
            await asyncio.gather(
                self._forward(reader, upstream_writer), self._forward(upstream_reader, writer)
            )
        finally:
            self._writers -= pair
            for one in pair:
                one.close()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


async def test_tcp_resets_in_mid_stream_cost_no_token_and_run_nothing_again(bench: Any) -> None:
    host, engine = await bench.host()
    server = GrpcServer(host.serve, bind="127.0.0.1:0", token=TOKEN)
    proxy = TcpProxy(await server.start())
    router = bench.router(GrpcDialer(TOKEN), f"127.0.0.1:{await proxy.start()}")
    await router.ready()
    names = [f"r{n}" for n in range(8)]
    router.session.send(bench.submit(*((name, 1000 * n, 120) for n, name in enumerate(names))))
    for resets in range(1, 4):
        at = 25 * resets
        await router.until(lambda at=at: len(router.tokens.get("r0", ())) >= at)
        assert proxy.reset() == 2
        await router.ready(resets + 1)
    await router.ended(*names)
    for n, name in enumerate(names):
        assert router.tokens[name] == list(range(1000 * n, 1000 * n + 120))
    assert engine.submitted == names
    assert engine.aborted == []
    kinds = [type(event) for event in router.told()]
    assert kinds == [SessionReady] + [SessionInterrupted, SessionReady] * 3
    assert SessionLost not in kinds
    await router.close()
    await server.stop(0)
    await proxy.stop()


async def test_a_worker_that_goes_away_over_grpc_interrupts_and_then_loses_the_session(bench: Any) -> None:
    host, _ = await bench.host()
    server = GrpcServer(host.serve, bind="127.0.0.1:0", token=TOKEN)
    router = bench.router(GrpcDialer(TOKEN), f"127.0.0.1:{await server.start()}")
    await router.ready()
    await server.stop(0)
    await router.until(lambda: any(isinstance(event, SessionLost) for event in router.events))
    assert [type(event) for event in router.told()] == [SessionReady, SessionInterrupted, SessionLost]
