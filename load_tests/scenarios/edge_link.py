"""CPU of the link between an edge process and its core: a request and a chunk in two processes, compared with
one process that does both.

The core is this process with a scripted router, the edge is a child started as a router starts it, and the
clients are other processes, as in the scenario `edge`, whose figures are repeated in the same run. CPU is the
kernel's accounting of each process, including system time.

    make bench-edge-link
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import uvloop
from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, GatewaySpec, ModelSpec
from kvasir.core.requests import FinishReason
from kvasir_platform.edge.edges import Edges
from kvasir_platform.gateway.start import make_gateway, make_metrics, make_models
from load_tests.options import no_options
from load_tests.report import Row, median, write
from load_tests.scenarios.edge import STREAMS, answer_at_once, body, client

CHUNKS = 30_000
REPEATS = 3
REQUESTS = 1500
_PER_STEP = (1, 8, 32, 128)
_SETTLE_S = 0.05


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text(encoding="ascii").split()[0]) for each in threads) / 1e9


class Bench:
    """One arrangement of processes, given by the pids that are counted, with a client."""

    def __init__(self, pipe: Connection, router: ScriptedRouter, pids: Mapping[str, int], port: int) -> None:
        self._pipe = pipe
        self._router = router
        self._pids = pids
        self.port = port

    async def ask(self, *desired: object) -> None:
        """Send a command to the client and wait until it is done."""
        self._pipe.send(desired)
        await asyncio.to_thread(self._pipe.recv)

    async def request_us(self) -> dict[str, float]:
        """CPU microseconds of one small request with an answer of one token, by process."""
        self._router.script = partial(answer_at_once, self._router)
        request = body(100, stream=False)
        await self.ask("requests", request, REQUESTS // 10)
        before = self._spent()
        await self.ask("requests", request, REQUESTS)
        after = self._spent()
        return {name: (after[name] - before[name]) / REQUESTS * 1e6 for name in after}

    async def chunk_us(self, per_step: int) -> dict[str, float]:
        """CPU microseconds of one chunk when a step brings `per_step` deltas of as many streams."""
        self._router.script = None
        self._router.streams.clear()
        asked = asyncio.create_task(self.ask("streams", STREAMS))
        await self._router.submitted(STREAMS)
        streams = list(self._router.streams)
        for stream in streams:
            stream.emit("first ")
        await self._settled()
        total = min(CHUNKS, 3_000 * per_step) // per_step * per_step
        turn = 0
        before = self._spent()
        for _ in range(total // per_step):
            for _ in range(per_step):
                streams[turn % STREAMS].emit(" token")
                turn += 1
            await asyncio.sleep(0)
        await self._settled()
        after = self._spent()
        for stream in streams:
            stream.emit(".", finish=FinishReason.LENGTH)
            stream.finish()
        await asked
        return {name: (after[name] - before[name]) / total * 1e6 for name in after}

    def _spent(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._pids.items()}

    async def _settled(self) -> None:
        """Wait until every process is idle."""
        spent = self._spent()
        while True:
            await asyncio.sleep(_SETTLE_S)
            now = self._spent()
            if all(now[name] - spent[name] < _SETTLE_S / 10 for name in now):
                return
            spent = now


async def run(pipes: Mapping[str, Connection], listen: socket.socket) -> list[Row]:
    """All rows, medians of a few repetitions in turn, because the machine's speed drifts."""
    clock = MonotonicClock()
    deployment = Deployment(
        model=ModelSpec(max_model_len=200_000),
        gateway=GatewaySpec(port=0, stream_buffer_bytes=4 << 20, edges=1),
    )
    here = psutil.Process()
    near, far = ScriptedRouter(clock), ScriptedRouter(clock)
    gateway = make_gateway(deployment, near, clock)
    edges = Edges(
        1, deployment, far, clock=clock, metrics=make_metrics(deployment), models=make_models(deployment)
    )
    started: asyncio.Queue[int] = asyncio.Queue()
    tell = lambda _, port: started.put_nowait(port)  # noqa: E731
    serving = [asyncio.create_task(gateway.serve(listen, tell))]
    await started.get()
    before = {child.pid for child in here.children()}
    serving.append(asyncio.create_task(edges.serve(None, tell)))
    port = await started.get()
    (edge,) = [child.pid for child in here.children() if child.pid not in before]
    one = Bench(pipes["one"], near, {"one process": here.pid}, listen.getsockname()[1])
    two = Bench(pipes["two"], far, {"core": here.pid, "edge": edge}, port)
    pipes["two"].send(port)

    async def rows(
        name: str, unit: str, measure: Callable[[Bench], Awaitable[dict[str, float]]], note: str
    ) -> list[Row]:
        samples: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            for bench in (one, two):
                for process, value in (await measure(bench)).items():
                    samples.setdefault(process, []).append(value)
        alone, _ = median(samples["one process"])
        made = []
        for process, values in samples.items():
            value, spread = median(values)
            peer = None if process == "one process" else alone
            made.append(
                Row(
                    f"{name}, {process}",
                    value,
                    unit,
                    "lower",
                    spread=spread,
                    note=note,
                    peer=peer,
                    ratio=None if peer is None else value / peer,
                )
            )
        return made

    found = await rows("request, 100 B", "CPU us", Bench.request_us, "answered with one token")
    for per_step in _PER_STEP:
        found += await rows(
            f"chunk, {per_step} deltas a step",
            "CPU us",
            partial(_chunk, per_step),
            f"{STREAMS} streams",
        )
    for pipe in pipes.values():
        pipe.send(("stop",))
    edge_mib = psutil.Process(edge).memory_info().rss / (1 << 20)
    found.append(Row("memory of an edge", edge_mib, "MiB", "lower", note="resident, after the load"))
    gateway.stop()
    edges.stop()
    await asyncio.gather(*serving)
    return found


async def _chunk(per_step: int, bench: Bench) -> dict[str, float]:
    return await bench.chunk_us(per_step)


def _late_client(pipe: Connection) -> None:
    """A client that receives its port first."""
    client(pipe, pipe.recv())


def main() -> None:
    """Measure, write the report and print its table."""
    no_options(__doc__)
    listen = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("spawn")
    (near, near_end), (far, far_end) = context.Pipe(), context.Pipe()
    clients = [
        context.Process(target=client, args=(near_end, listen.getsockname()[1])),
        context.Process(target=_late_client, args=(far_end,)),
    ]
    for each in clients:
        each.start()
    try:
        rows: list[Row] = uvloop.run(run({"one": near, "two": far}, listen))
    finally:
        for each in clients:
            each.terminate()
            each.join()
    print(write("edge_link", "make bench-edge-link", rows).with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
