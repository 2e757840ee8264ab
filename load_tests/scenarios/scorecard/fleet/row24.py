"""A long mixed load: memory, descriptors and tasks do not grow with the requests that were served.

Between two periods of load everything comes to rest, and is counted there. What a request leaves behind is
the slope over all such counts, so that what is filled once, as caches and records of decisions, is not taken
for growth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from statistics import linear_regression

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, LabWorker, Layout
from tests.kit.lab.invariants import at_rest
from tests.kit.lab.load import asks
from tests.kit.lab.processes import descriptors, resident_bytes
from tests.kit.lab.stream import Ask, Outcome, complete, open_stream

from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial, engine, exactness, exercise, split

PROMISE = "no growth"
SMALLEST_OBJECT = 16.0
"""Bytes of the smallest object of Python: a request that leaves nothing behind leaves less."""
MOST_A_THOUSAND = 0.05
"""Descriptors and tasks gained in 1,000 requests: less than one for each worker that restarts."""
_REST_S = 15.0
_DRAIN_S = 30.0
_KINDS = ("answered",) * 8 + ("left", "refused")


@dataclass(frozen=True, slots=True)
class Size:
    """`periods` of load, `period_s` long each, after `first` ones that are not counted. `width` clients send
    one request after the other; in each period one worker restarts."""

    prefill: int = 2
    decode: int = 3
    width: int = 16
    first: int = 6
    periods: int = 18
    period_s: float = 25.0
    tokens: int = 8


@dataclass(slots=True)
class _Load:
    """What clients have done so far."""

    size: Size
    answered: list[Outcome] = field(default_factory=list)
    left: int = 0
    refused: int = 0

    @property
    def requests(self) -> int:
        return len(self.answered) + self.left + self.refused


@dataclass(frozen=True, slots=True)
class _Count:
    """What there is at rest after so many requests: by process, resident bytes and descriptors; tasks of the
    router."""

    requests: int
    resident: dict[str, int]
    descriptors: dict[str, int]
    tasks: float


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    spec = engine(sim={"decode_step_s": 0.005}, kv_cache_bytes=1 << 26)
    layout = Layout({"prefill": size.prefill, "decode": size.decode})
    load = _Load(size)
    counts: list[_Count] = []
    async with exercise(trial, split(spec, spec), layout) as fleet:
        restarted = fleet.pool("decode")[-1]
        steady = {name: pid for name, pid in fleet.pids().items() if name != restarted.name}
        for period in range(size.first + size.periods):
            work = asks(trial.rng(period), 64, size.tokens)
            await _period(fleet, restarted, work, trial.rng(1000 + period), load)
            await at_rest(fleet, _REST_S)
            counts.append(await _count(fleet, steady, load))
            trial.say(
                f"{load.requests:,} requests: {counts[-1].resident[fleet.routers[0].name] / 2**20:.1f} MiB, "
                f"{counts[-1].descriptors[fleet.routers[0].name]} descriptors, {counts[-1].tasks:g} tasks"
            )
        router = fleet.routers[0].name
    counts = counts[size.first :]
    return [*_growth(counts, router, size.periods), exactness(load.answered)]


async def _period(fleet: Fleet, restarted: LabWorker, work: Iterator[Ask], rng: Random, load: _Load) -> None:
    """Load for a period, in the midst of which the worker drains and starts again."""
    end = fleet.clock.now() + load.size.period_s

    async def client() -> None:
        while fleet.clock.now() < end:
            kind, ask = rng.choice(_KINDS), next(work)
            if kind == "answered":
                load.answered.append(await complete(fleet.address, ask, fleet.clock))
            elif kind == "left":
                stream = await open_stream(fleet.address, ask, fleet.clock)
                await stream.begun.wait()
                stream.disconnect()
                load.left += 1
            else:
                outcome = await complete(fleet.address, replace(ask, model="unknown"), fleet.clock)
                if outcome.status != 404:
                    raise NotProven(f"an unknown model was answered with {outcome.status}: {outcome.detail}")
                load.refused += 1

    async def restart() -> None:
        await fleet.stop_worker(restarted, _DRAIN_S)
        await fleet.start_worker(restarted)
        await fleet.all_ready()

    await asyncio.gather(restart(), *(client() for _ in range(load.size.width)))


async def _count(fleet: Fleet, steady: dict[str, int], load: _Load) -> _Count:
    page = await gateway.metrics(fleet.address)
    return _Count(
        load.requests,
        {name: resident_bytes(pid) for name, pid in steady.items()},
        {name: descriptors(pid) for name, pid in steady.items()},
        gateway.metric(page, "kvasir_event_loop_tasks"),
    )


def _growth(counts: list[_Count], router: str, restarts: int) -> list[Figure]:
    """Return the slopes over the requests."""
    first, last = counts[0], counts[-1]
    served = [each.requests for each in counts]
    resident = {
        name: linear_regression(served, [each.resident[name] for each in counts]).slope
        for name in first.resident
    }
    held = {
        name: 1000 * linear_regression(served, [each.descriptors[name] for each in counts]).slope
        for name in first.descriptors
    }
    tasks = 1000 * linear_regression(served, [each.tasks for each in counts]).slope
    memory = resident.pop(router)
    worker, descriptor = max(resident, key=resident.__getitem__), max(held, key=held.__getitem__)
    note = f"{served[-1] - served[0]:,} requests, {restarts} restarts of a worker"
    return [
        Figure("growth of the router's memory for a request", memory, "B", "lower", SMALLEST_OBJECT,
               f"{note}; {first.resident[router] / 2**20:.1f} to {last.resident[router] / 2**20:.1f} MiB"),
        Figure("growth of a worker's memory for a request", resident[worker], "B", "lower", SMALLEST_OBJECT,
               f"the most of {len(resident)} workers: {worker}, {first.resident[worker] / 2**20:.1f} to "
               f"{last.resident[worker] / 2**20:.1f} MiB"),
        Figure("descriptors gained in 1,000 requests", held[descriptor], "descriptors", "lower",
               MOST_A_THOUSAND, f"the most of all processes: {descriptor}, "
               f"{first.descriptors[descriptor]} to {last.descriptors[descriptor]}"),
        Figure("tasks of the router gained in 1,000 requests", tasks, "tasks", "lower", MOST_A_THOUSAND,
               f"{first.tasks:g} to {last.tasks:g}"),
    ]  # fmt: skip
