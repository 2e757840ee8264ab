"""What passed between a load generator and its server: the times that it ought to have measured.

A server's times differ from run to run by more than load generators do, on a machine that others use too. A
relay between the two notes them for the very requests of each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from kvasir.core.quantiles import quantile
from kvasir_router.tasks import first_of

_READ = 1 << 16
_TIMEOUT_S = 30
_ENDS_S = 5
_QUANTILES = {"p50": 0.5, "p95": 0.95}


@dataclass(slots=True)
class Stream:
    """A streamed answer: when its request came, when each event with output passed, in seconds, and its
    output tokens by the server's count."""

    begun_s: float
    events_s: list[float] = field(default_factory=list)
    tokens: int = 0


class Wire:
    """Relays connections, and keeps the streams that have ended, in their order of arrival."""

    def __init__(self, url: str, now: Callable[[], float] = time.perf_counter) -> None:
        at = urlsplit(url)
        self.url = ""
        self._server = (str(at.hostname), int(at.port or 80))
        self._now = now
        self._ended: list[Stream] = []

    def take(self, count: int) -> Mapping[str, float]:
        """Return the figures of the last `count` streams to begin, in ms, and forget all. Raise ValueError if
        there were fewer."""
        ended, self._ended = sorted(self._ended, key=lambda stream: stream.begun_s), []
        if len(ended) < count:
            raise ValueError(f"{len(ended)} streams ended, {count} were expected")
        return figures_of(ended[-count:])

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either side ends it."""
        async with contextlib.AsyncExitStack() as ends:
            ends.push_async_callback(_close, writer)
            server_reader, server_writer = await asyncio.open_connection(*self._server)
            ends.push_async_callback(_close, server_writer)
            running: list[Stream] = []
            await first_of(
                self._ask(reader, server_writer, running), self._answer(server_reader, writer, running)
            )

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, running: list[Stream]
    ) -> None:
        while data := await reader.read(_READ):
            if data.startswith(b"POST ") and not running:
                running.append(Stream(self._now()))
            writer.write(data)
            await writer.drain()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, running: list[Stream]
    ) -> None:
        rest = b""
        while data := await reader.read(_READ):
            now = self._now()
            writer.write(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if running and line.startswith(b"data: "):
                    self._event(line[6:], running, now)
            await writer.drain()

    def _event(self, data: bytes, running: list[Stream], now: float) -> None:
        if data.startswith(b"[DONE]"):
            self._ended.append(running.pop())
            return
        event = json.loads(data)
        if any(choice.get("delta", {}).get("content") for choice in event.get("choices") or ()):
            running[0].events_s.append(now)
        if event.get("usage"):
            running[0].tokens = event["usage"]["completion_tokens"]


def figures_of(streams: Sequence[Stream]) -> Mapping[str, float]:
    """Return the mean, median and 95th percentile of each time, in ms."""
    times = {
        "TTFT": [each.events_s[0] - each.begun_s for each in streams],
        "TPOT": [(each.events_s[-1] - each.events_s[0]) / (each.tokens - 1) for each in streams],
        "ITL": [later - earlier for each in streams for earlier, later in pairwise(each.events_s)],
        "E2E": [each.events_s[-1] - each.begun_s for each in streams],
    }
    found = {}
    for name, values in times.items():
        found[f"{name} mean"] = math.fsum(values) / len(values) * 1e3
        found |= {f"{name} {key}": quantile(values, q) * 1e3 for key, q in _QUANTILES.items()}
    return found


@contextlib.contextmanager
def relayed(url: str) -> Iterator[Wire]:
    """Relay to the server at `url` from an address of this machine, in a thread of its own."""
    wire = Wire(url)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="wire")
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(_TIMEOUT_S)

    try:
        server = run(asyncio.start_server(wire.relay, "127.0.0.1", 0))
        wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield wire
        finally:
            run(_closed(server))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _closed(server: asyncio.Server) -> None:
    """Stop listening, and let connections end: clients have closed theirs."""
    server.close()
    await server.wait_closed()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=_ENDS_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
