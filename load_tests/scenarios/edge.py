"""CPU of the HTTP edge alone: per request, and per streamed chunk by deltas per step.

The gateway runs in this process with a scripted router; its clients are another process, so that
`time.process_time` counts the gateway only, including its system time. gRPC, the router and its index are
excluded; the figures are a lower bound of the product's cost.

    make bench-edge
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import selectors
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from tests.kit.gateway.scripted_router import ScriptedRouter, ScriptedStream

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, GatewaySpec, ModelSpec
from kvasir.core.requests import FinishReason
from kvasir_platform.gateway.start import make_gateway
from load_tests.options import no_options
from load_tests.report import Row, median, write

STREAMS = 256
CHUNKS = 60_000
REPEATS = 3


def body(prompt_bytes: int, *, stream: bool) -> bytes:
    """A chat request with a prompt of about that many bytes of English."""
    text = ("The quick brown fox jumps over the lazy dog. " * (prompt_bytes // 45 + 1))[:prompt_bytes]
    message = {"role": "user", "content": text}
    payload = json.dumps({"model": "kvasir-tiny", "messages": [message], "stream": stream, "max_tokens": 16})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer x\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return (head + payload).encode()


def client(pipe: Connection, port: int) -> None:
    """Run the parent's commands: ("requests", bytes, n) or ("streams", n), and report each as done."""
    while True:
        desired = pipe.recv()
        if desired[0] == "requests":
            _requests(port, desired[1], desired[2])
        elif desired[0] == "streams":
            _streams(port, desired[1])
        else:
            return
        pipe.send("done")


def _requests(port: int, request: bytes, count: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            sock.sendall(request)
            got = b""
            while b"\r\n\r\n" not in got:
                got += sock.recv(65536)
            head, _, rest = got.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(got[:300].decode())
            missing = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) - len(rest)
            while missing > 0:
                missing -= len(sock.recv(65536))


def _streams(port: int, count: int) -> None:
    selector = selectors.DefaultSelector()
    request = body(100, stream=True)
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        selector.register(sock, selectors.EVENT_READ)
    left = count
    while left:
        for key, _ in selector.select():
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            data = peer.recv(262144)
            if not data or data.endswith(b"0\r\n\r\n"):
                selector.unregister(peer)
                peer.close()
                left -= 1


def answer_at_once(router: ScriptedRouter, stream: ScriptedStream) -> None:
    """One token and the end. The router forgets an ended request, as the real one does: the memory of
    kept requests would be returned to the system after each batch and cost page faults in the next."""
    stream.emit("Hello", finish=FinishReason.STOP)
    stream.finish()
    router.streams.clear()


class Bench:
    """The gateway with its client process."""

    def __init__(self, pipe: Connection, router: ScriptedRouter) -> None:
        self._pipe = pipe
        self._router = router

    async def ask(self, *desired: Any) -> None:
        """Send a command to the client and wait until it is done."""
        self._pipe.send(desired)
        await asyncio.to_thread(self._pipe.recv)

    async def request_ms(self, prompt_bytes: int, count: int) -> float:
        """CPU milliseconds of one request with an answer of one token."""
        self._router.script = partial(answer_at_once, self._router)
        request = body(prompt_bytes, stream=False)
        await self.ask("requests", request, max(10, count // 10))
        began = time.process_time()
        await self.ask("requests", request, count)
        return (time.process_time() - began) / count * 1e3

    async def chunk_us(self, per_step: int) -> float:
        """CPU microseconds of one chunk when a step brings `per_step` deltas of as many streams."""
        self._router.script = None
        self._router.streams.clear()
        asked = asyncio.create_task(self.ask("streams", STREAMS))
        await self._router.submitted(STREAMS)
        streams = list(self._router.streams)
        for stream in streams:
            stream.emit("first ")
        await asyncio.sleep(0.2)
        total = min(CHUNKS, 6_000 * per_step)
        turn = 0
        began = time.process_time()
        for _ in range(total // per_step):
            for _ in range(per_step):
                streams[turn % STREAMS].emit(" token")
                turn += 1
            await asyncio.sleep(0)
        spent = time.process_time() - began
        for stream in streams:
            stream.emit(".", finish=FinishReason.LENGTH)
            stream.finish()
        await asked
        return spent / (total // per_step * per_step) * 1e6


async def run(pipe: Connection, listen: socket.socket) -> list[Row]:
    """All rows, medians of a few repetitions; targets are those of the whole gateway path."""
    clock = MonotonicClock()
    router = ScriptedRouter(clock)
    deployment = Deployment(
        model=ModelSpec(max_model_len=200_000),
        gateway=GatewaySpec(stream_buffer_bytes=4 << 20),
    )
    gateway = make_gateway(deployment, router, clock)
    started = asyncio.Event()
    serving = asyncio.create_task(gateway.serve(listen, lambda host, port: started.set()))
    await started.wait()
    bench = Bench(pipe, router)

    async def row(
        name: str, unit: str, target: float | None, measure: Callable[[], Awaitable[float]], note: str = ""
    ) -> Row:
        value, spread = median([await measure() for _ in range(REPEATS)])
        return Row(name, value, unit, "lower", target=target, spread=spread, note=note)

    rows = [
        await row(
            f"request, {name}",
            "CPU ms",
            target,
            partial(bench.request_ms, size, count),
            "tokens of kvasir-tiny; answered with one token",
        )
        for name, size, count, target in (
            ("100 B", 100, 2000, 0.20),
            ("16 KiB", 16 << 10, 200, 0.45),
            ("128 KiB", 128 << 10, 40, 2.5),
        )
    ]
    rows += [
        await row(
            f"chunk, {per_step} deltas a step",
            "CPU us",
            target,
            partial(bench.chunk_us, per_step),
            f"{STREAMS} streams",
        )
        for per_step, target in ((1, None), (8, 22.0), (32, 12.0), (128, 12.0))
    ]
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(Row("peak memory", peak_mib, "MiB", "lower", note="gateway and scripted router"))
    pipe.send(("stop",))
    gateway.stop()
    await serving
    return rows


def main() -> None:
    """Measure, write the report and print its table."""
    no_options(__doc__)
    listen = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=client, args=(theirs, listen.getsockname()[1]))
    process.start()
    try:
        rows: list[Row] = uvloop.run(run(ours, listen))
    finally:
        process.terminate()
        process.join()
    print(write("edge", "make bench-edge", rows).with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
