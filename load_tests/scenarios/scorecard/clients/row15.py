"""Ten thousand clients disconnect in mid-stream: each abort reaches the engine at once, and nothing leaks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.gateway import until
from tests.kit.lab.invariants import Descriptors, remaining
from tests.kit.lab.load import asks, quantile
from tests.kit.lab.processes import resident_bytes
from tests.kit.lab.stream import Stream, open_stream

from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    engine,
    exercise,
    split,
)

PROMISE = "abort reaches the engine"
_REST_S = 10.0


@dataclass(frozen=True, slots=True)
class Size:
    """`disconnects` clients, `batch` of them at the same time. Every third disconnects before its first
    token."""

    decode: int = 4
    prefill: int = 2
    disconnects: int = 10_000
    batch: int = 100
    tokens: int = 400


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    took: list[float] = []
    gone = 0
    spec = engine(sim={"decode_step_s": 0.02})
    layout = Layout({"prefill": size.prefill, "decode": size.decode})
    async with exercise(trial, split(spec, spec), layout) as fleet:
        work = asks(trial.rng(1), 64, size.tokens)
        before, tasks = Descriptors(fleet), await _tasks(fleet)
        router = fleet.routers[0].process.pid
        resident = 0
        while gone < size.disconnects:
            batch = min(size.batch, size.disconnects - gone)
            streams = [await open_stream(fleet.address, next(work), fleet.clock) for _ in range(batch)]
            for stream in streams[: batch - batch // 3]:
                await stream.begun.wait()
            took.append(await _leave(fleet, streams))
            gone += batch
            # The first half fills decision records, caches and memory pools.
            if not resident and gone * 2 >= size.disconnects:
                resident = resident_bytes(router)
            if gone % (10 * size.batch) == 0:
                trial.say(f"{gone:,} are gone, p99 {quantile(took, 0.99) * 1e3:.0f} ms")
        series = await gateway.metrics(fleet.address)
        counted = gateway.metric(series, "kvasir_requests_total", outcome="client_closed")
        grown = resident_bytes(router) - resident
        leaked = await _leaked(fleet, before, tasks)
    if counted < size.disconnects:
        raise NotProven(f"the gateway saw {counted:g} of {size.disconnects} disconnects")
    return [
        Figure(
            "p99 until no engine runs anything of those who left", quantile(took, 0.99) * 1e3, "ms", "lower",
            200.0,
            f"{size.batch} at one moment, {len(took)} times; median {quantile(took, 0.5) * 1e3:.0f} ms, "
            f"longest {max(took) * 1e3:.0f} ms; one engine step of 25 ms and the poll are in it",
        ),
        Figure("disconnects that the gateway counted", counted, "requests", "higher", size.disconnects),
        Figure("requests, blocks, descriptors and tasks leaked", len(leaked), "kinds", "lower", 0.0,
               "; ".join(leaked) or "of each process, at rest"),
        Figure("growth of the router's memory over the second half", grown / 2**20, "MiB", "lower"),
    ]  # fmt: skip


async def _leave(fleet: Fleet, streams: list[Stream]) -> float:
    """Disconnect all at once; return how long an engine still runs one of their requests, in seconds."""
    early = [stream for stream in streams if stream.ended.is_set()]
    if early:
        raise NotProven(f"{len(early)} streams ended before their clients left: {early[0].outcome.error}")

    async def nothing_runs() -> bool:
        page = await gateway.status(fleet.address)
        loads = [worker["load"] or {} for worker in page["workers"]]
        return not page["in_flight"] and not any(load.get("running") or load.get("waiting") for load in loads)

    if await nothing_runs():
        raise NotProven("no engine ran anything when the clients left")
    for stream in streams:
        stream.disconnect()
    return await until(nothing_runs, 10.0, "no engine runs anything", fleet.clock, 0.005)


async def _tasks(fleet: Fleet) -> float:
    return gateway.metric(await gateway.metrics(fleet.address), "kvasir_event_loop_tasks")


async def _leaked(fleet: Fleet, before: Descriptors, tasks: float) -> list[str]:
    """Return what is left when there was time to come to rest, of what was not there before."""
    left: list[str] = []

    async def nothing_left() -> bool:
        more = await _tasks(fleet) - tasks
        gained = [f"{name}: {count} descriptors" for name, count in before.grown().items()]
        left[:] = [*await remaining(fleet), *gained, *([f"{more:g} tasks of the router"] if more > 0 else [])]
        return not left

    with contextlib.suppress(TimeoutError):
        await until(nothing_left, _REST_S, "rest", fleet.clock, 0.05)
    return left
