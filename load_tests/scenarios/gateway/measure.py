"""Samples of every system, round by round, so that a drift of the machine touches all of them alike."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from load_tests.scenarios.gateway.bodies import SIZES, WARM
from load_tests.scenarios.gateway.processes import Child, ProcessError
from load_tests.scenarios.gateway.systems import WORKERS, System
from load_tests.scenarios.gateway.usage import cpu_s, resident_bytes

DELTAS_A_MESSAGE = (1, 8, 32, 128)
STREAMS = 512
FEWER_STREAMS = {1: 64, 8: 256}
"""With few deltas a message: of 512 streams, one a message would be 25,600 messages a second, more than a
worker in Python can send on one core, and eight a message leave no time to a router that shares two."""
TTFT_REQUESTS = 100
WINDOW_S = 4.0
_SETTLE_S, _IDLE_CORES = 60.0, 0.1
Figures = Mapping[str, Any]


class Samples:
    """Figures by system and measurement, and what went wrong."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[Figures]] = defaultdict(list)
        self.wrong: dict[str, str] = {}

    def add(self, system: str, what: str, figures: Figures) -> None:
        """Keep what one measurement gave; a system that failed is left out of the rows it failed in."""
        if "error" in figures:
            self.wrong.setdefault(f"{system}, {what}", str(figures["error"]))
            say(f"  {system}: {what}: {figures['error']}")
            return
        self._found[system, what].append(figures)

    def of(self, system: str, what: str) -> Sequence[Figures]:
        """All rounds."""
        return self._found.get((system, what), ())

    def cpu(self, system: str, what: str, of: str) -> list[float]:
        """CPU seconds for each of what was counted, over the rounds."""
        return [each["cpu_s"] / each[of] for each in self.of(system, what)]


def say(text: str) -> None:
    """Tell how far the run is."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def warm_up(client: Child, systems: Sequence[System], samples: Samples, scale: float) -> None:
    """Short texts first: interpreters and caches settle, and rates are learned."""
    client.ask({"do": "round", "scale": scale})
    for system in systems:
        for size in SIZES:
            samples.add(
                system.name, f"warm-up, {size.name}", client.ask(system.order("requests", size=size.name))
            )


def one_round(client: Child, systems: Sequence[System], samples: Samples, scale: float) -> None:
    """Everything once of every system, kind by kind, the systems in turn. Raises ProcessError."""
    client.ask({"do": "round", "scale": scale})
    requested = [system for system in systems if not system.only_chunks]
    for size in (*SIZES, WARM):
        for system in requested:
            samples.add(system.name, size.name, client.ask(system.order("requests", size=size.name)))
    for system in requested:
        count = max(10, round(TTFT_REQUESTS * scale))
        samples.add(system.name, "ttft", client.ask(system.order("ttft", count=count)))
    for system in systems:
        if system.workers is None:
            samples.add(system.name, chunk_name(0), _chunks(client, system, 0, scale))
            continue
        for deltas in DELTAS_A_MESSAGE:
            samples.add(system.name, chunk_name(deltas), _chunks(client, system, deltas, scale))


def _chunks(client: Child, system: System, deltas: int, scale: float) -> Figures:
    """Streams that go on. `deltas` a message where the system's workers put several into one."""
    streams = FEWER_STREAMS.get(deltas, STREAMS)
    before: Figures = {}
    if system.workers is not None:
        system.workers.ask({"groups": streams // WORKERS // deltas})
        before = system.workers.ask({"stats": 1})
    window_s = max(1.0, WINDOW_S * scale)
    figures = client.ask(system.order("streams", streams=streams, window_s=window_s))
    if system.workers is not None:
        after = system.workers.ask({"stats": 1})
        messages = after["messages"] - before["messages"]
        figures["deltas_a_message"] = (after["deltas"] - before["deltas"]) / max(1, messages)
    return figures | {"streams": streams}


def chunk_name(deltas: int) -> str:
    """The measurement of streams with so many deltas a message, 0 for those without messages."""
    return f"chunk, {deltas}" if deltas else "chunk"


def fill(system: System, blocks: int) -> tuple[int, int, int]:
    """Have the router index so many blocks: how many there were in the end, and its resident bytes before and
    after."""
    if system.workers is None:
        raise ProcessError("only Kvasir's workers report blocks")
    _settle(system)
    before = resident_bytes(system.process.pid)
    held = int(system.workers.ask({"hold": blocks})["held"])
    _settle(system)
    return held, before, resident_bytes(system.process.pid)


def _settle(system: System) -> None:
    """Wait until it does next to nothing: what it does at its start and with new blocks is done."""
    deadline = time.monotonic() + _SETTLE_S
    busy = True
    while busy and time.monotonic() < deadline:
        before = cpu_s(system.process.pid)
        time.sleep(1.0)
        busy = cpu_s(system.process.pid) - before > _IDLE_CORES
