"""Samples of every system, round by round, so that drift of the machine affects all systems equally."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from load_tests.scenarios.gateway.bodies import SIZES, WARM
from load_tests.scenarios.gateway.processes import Child, ProcessError
from load_tests.scenarios.gateway.systems import System
from load_tests.scenarios.gateway.usage import cpu_s, resident_bytes

DELTAS_A_MESSAGE = (1, 8, 32, 128)
STREAMS = 512
FEWER_STREAMS = {1: 64, 8: 256}
"""Streams where few deltas share a message. With 512 streams, one delta per message would be 25,600 messages
per second, more than a worker in Python can send on one core; eight per message leave no time to a router
that shares two cores."""
WHOLE_STEPS = (8, 32, 128)
"""Streams that share a step of a worker in the measurements of whole requests."""
TTFT_REQUESTS = 100
WINDOW_S = 4.0
WHOLE_S = 6.0
_SETTLE_S, _IDLE_CORES = 60.0, 0.1
Figures = Mapping[str, Any]


class Samples:
    """Figures by system and measurement, and errors."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[Figures]] = defaultdict(list)
        self.wrong: dict[str, str] = {}

    def add(self, system: str, what: str, figures: Figures) -> None:
        """Keep the result of one measurement; a system that failed is omitted from the rows in which it
        failed."""
        if "error" in figures:
            self.wrong.setdefault(f"{system}, {what}", str(figures["error"]))
            say(f"  {system}: {what}: {figures['error']}")
            return
        self._found[system, what].append(figures)

    def of(self, system: str, what: str) -> Sequence[Figures]:
        """Samples of all rounds."""
        return self._found.get((system, what), ())

    def cpu(self, system: str, what: str, of: str) -> list[float]:
        """CPU seconds per counted item, one per round."""
        return [each["cpu_s"] / each[of] for each in self.of(system, what)]


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def warm_up(client: Child, systems: Sequence[System], samples: Samples, scale: float) -> None:
    """Short texts first: interpreters and caches warm up, and rates are learned."""
    client.ask({"do": "round", "scale": scale})
    for system in systems:
        for size in SIZES:
            samples.add(
                system.name, f"warm-up, {size.name}", client.ask(system.order("requests", size=size.name))
            )


def one_round(client: Child, systems: Sequence[System], samples: Samples, scale: float) -> None:
    """Run every measurement on every system, kind by kind, the systems in turn. Raise ProcessError."""
    client.ask({"do": "round", "scale": scale})
    requested = [system for system in systems if not system.only_chunks]
    for size in (*SIZES, WARM):
        for system in requested:
            samples.add(system.name, size.name, client.ask(system.order("requests", size=size.name)))
    for system in requested:
        ttft(client, system, samples, scale)
    for deltas in DELTAS_A_MESSAGE:
        for system in systems:
            if system.regroup is not None:
                samples.add(system.name, chunk_name(deltas), chunks(client, system, deltas, scale))


def ttft(client: Child, system: System, samples: Samples, scale: float) -> None:
    """Single requests one after another, until their first token and their end."""
    count = max(10, round(TTFT_REQUESTS * scale))
    samples.add(system.name, "ttft", client.ask(system.order("ttft", count=count)))


def chunks(client: Child, system: System, deltas: int, scale: float, most: int = STREAMS) -> Figures:
    """Streams that do not end, `deltas` of which get a token at the same time from each worker; at most
    `most` of them."""
    streams = min(most, FEWER_STREAMS.get(deltas, STREAMS))
    before: Figures = {}
    if system.regroup is not None:
        system.regroup(max(1, streams // system.decoding // deltas))
    if system.workers is not None:
        before = system.workers.ask({"stats": 1})
    window_s = max(1.0, WINDOW_S * scale)
    figures = client.ask(system.order("streams", streams=streams, window_s=window_s))
    if system.workers is not None:
        after = system.workers.ask({"stats": 1})
        messages = after["messages"] - before["messages"]
        figures["deltas_a_message"] = (after["deltas"] - before["deltas"]) / max(1, messages)
    return figures | {"streams": streams}


def chunk_name(deltas: int) -> str:
    """The name of the measurement with that many deltas per message, or at the same time."""
    return f"chunk, {deltas}"


def whole_requests(
    client: Child, systems: Sequence[System], samples: Samples, chars: int, scale: float
) -> None:
    """Whole requests of the mean size, on every system whose workers can be told how many streams share a
    step. Raise ProcessError."""
    for deltas in WHOLE_STEPS:
        streams = FEWER_STREAMS.get(deltas, STREAMS)
        for system in systems:
            if system.regroup is None or system.only_chunks:
                continue
            system.regroup(max(1, streams // system.decoding // deltas))
            order = system.order("whole", streams=streams, chars=chars, window_s=WHOLE_S * scale)
            figures = client.ask(order)
            samples.add(system.name, whole_name(deltas), dict(figures) | {"streams": streams})


def whole_name(deltas: int) -> str:
    """The name of the measurement of whole requests with that many streams in a step."""
    return f"whole, {deltas}"


def fill(system: System, blocks: int) -> tuple[int, int, int]:
    """Make the router index that many blocks; return how many it has, and its resident bytes before and
    after."""
    if system.workers is None:
        raise ProcessError("only Kvasir's workers report blocks")
    _settle(system)
    before = resident_bytes(system.process.pid)
    held = int(system.workers.ask({"hold": blocks})["held"])
    _settle(system)
    return held, before, resident_bytes(system.process.pid)


def _settle(system: System) -> None:
    """Wait until the process is nearly idle: work of its start and of new blocks is done."""
    deadline = time.monotonic() + _SETTLE_S
    busy = True
    while busy and time.monotonic() < deadline:
        before = cpu_s(system.process.pid)
        time.sleep(1.0)
        busy = cpu_s(system.process.pid) - before > _IDLE_CORES
