"""Rolling restarts under load: a worker joins, an older one gets SIGTERM, drains and exits."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kit.lab.fleet import Fleet, LabWorker, Layout
from tests.kit.lab.load import OpenLoop, asks, tally

from kvasir.config.spec.deployment import WorkerSpec
from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    exactness,
    exercise,
    migrations,
    seen,
    split,
)

PROMISE = "drain"
EXIT_S = 10.0
"""Time that an exit may take beyond the drain itself."""


@dataclass(frozen=True, slots=True)
class Size:
    """`restarts` of workers, alternating decode and prefill. Streams last about 1.7 s and a drain `drain_s`,
    so that some streams end within it and the others fail over."""

    decode: int = 4
    prefill: int = 2
    restarts: int = 20
    rate: float = 15.0
    tokens: int = 50
    drain_s: float = 1.0


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    layout = Layout({"prefill": size.prefill, "decode": size.decode}, reserved={"prefill": 1, "decode": 1})
    deployment = split(worker=WorkerSpec(drain_s=size.drain_s))
    busy_at_stop = 0
    took: list[float] = []
    async with exercise(trial, deployment, layout) as fleet:
        load = OpenLoop(
            [fleet.address], asks(trial.rng(1), 64, size.tokens), size.rate,
            clock=trial.clock, rng=trial.rng(2),
        )  # fmt: skip
        load.start()
        await trial.clock.sleep(2.0)
        spare = {pool: _idle(fleet, pool) for pool in ("decode", "prefill")}
        oldest = {pool: fleet.pool(pool) for pool in spare}
        for turn in range(size.restarts):
            pool = ("decode", "prefill")[turn % 2]
            await fleet.start_worker(spare[pool])
            await fleet.all_ready()
            victim = oldest[pool].pop(0)
            busy_at_stop += (await seen(fleet.address, victim))["in_flight"]
            began = trial.clock.now()
            await fleet.stop_worker(victim, size.drain_s + EXIT_S)
            took.append(trial.clock.now() - began)
            oldest[pool].append(spare[pool])
            spare[pool] = victim
            bad = [outcome for outcome in load.outcomes if outcome.error]
            trial.say(f"restart {turn + 1} of {size.restarts}: {pool}, {took[-1]:.1f} s, {len(bad)} failed")
        await trial.clock.sleep(1.0)
        outcomes = await load.stop()
        moved = await migrations(fleet)
    if not busy_at_stop:
        raise NotProven("no worker had streams at SIGTERM")
    result = tally(outcomes)
    return [
        Figure(
            "failed requests", len(outcomes) - result.exact, "requests", "lower", 0.0,
            f"of {len(outcomes)}, {size.restarts} restarts with {busy_at_stop} streams on the workers at "
            f"SIGTERM, of which {moved:g} failed over; {result.errors or 'no errors'}",
        ),
        Figure("longest drain, from SIGTERM to the end of the process", max(took), "s", "lower"),
        Figure("p99 of the longest gap", result.gap_p99_s, "s", "lower"),
        exactness(outcomes),
    ]  # fmt: skip


def _idle(fleet: Fleet, pool: str) -> LabWorker:
    return next(worker for worker in fleet.workers if worker.pool == pool and worker.process is None)
