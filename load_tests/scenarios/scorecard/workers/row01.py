"""SIGKILL of a decode worker in mid-stream: its streams continue on other workers, token for token."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, LabWorker, Layout
from tests.kit.lab.load import asks, quantile, tally
from tests.kit.lab.stream import Outcome

from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    begin,
    decoded_on,
    exactness,
    exercise,
    finished,
    migrations,
    split,
)

PROMISE = "streams go on elsewhere, greedy tokens identical"


@dataclass(frozen=True, slots=True)
class Size:
    """`kills` workers in sequence, with `streams` running at each kill; `real`: the same with vLLM."""

    decode: int = 8
    prefill: int = 2
    kills: int = 8
    streams: int = 100
    tokens: int = 100
    real: bool = True


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    outcomes: list[Outcome] = []
    hit: list[Outcome] = []
    layout = Layout({"prefill": size.prefill, "decode": size.decode})
    async with exercise(trial, split(), layout) as fleet:
        for kill in range(size.kills):
            victim, ended, struck = await _kill(trial, fleet, size, kill)
            outcomes += ended
            hit += struck
            result = tally(ended)
            trial.say(
                f"kill {kill + 1} of {size.kills}: {result.exact} of {result.streams} exact, "
                f"{len(struck)} were hit {result.errors or ''}"
            )
            await fleet.start_worker(victim)
            await fleet.all_ready()
        moved = await migrations(fleet)
    if moved < len(hit):
        raise NotProven(f"{len(hit)} streams lost their worker, and only {moved:g} failed over")
    exact = tally(outcomes)
    real: list[Figure] = []
    if size.real:
        trial.say("the same with real vLLM: four engines are starting")
        async with real_engines.stage(trial.folder) as stage:
            real = (await real_engines.decode_worker_killed(stage)).figures()
    return [
        Figure("streams exact", exact.exact, "streams", "higher", exact.streams, f"{len(hit)} were hit"),
        exactness(outcomes),
        Figure(
            "p99 of the longest gap of the streams that were hit",
            quantile([each.longest_gap_s for each in hit], 0.99),
            "s",
            "lower",
            2.0,
            f"longest {max(each.longest_gap_s for each in hit):.2f} s; all streams {exact.gap_p99_s:.2f} s",
        ),
        *real,
    ]


async def _kill(
    trial: Trial, fleet: Fleet, size: Size, kill: int
) -> tuple[LabWorker, list[Outcome], list[Outcome]]:
    """Kill the next worker, in turn, that has streams; return it, all streams, and those that ran on it."""
    work = asks(trial.rng(kill), 64, size.tokens)
    streams = await begin(fleet, fleet.address, work, size.streams)
    on = await decoded_on(fleet.address, streams)
    views = await gateway.workers(fleet.address)
    workers = fleet.pool("decode")
    turn = kill % len(workers)
    for victim in workers[turn:] + workers[:turn]:
        victim_id = views[victim.address]["worker_id"]
        struck = [
            stream
            for stream, where in zip(streams, on, strict=True)
            if where == victim_id and not stream.ended.is_set()
        ]
        if struck:
            await victim.running.kill()
            return victim, await finished(streams), [stream.outcome for stream in struck]
    raise NotProven("no stream was running when a worker was to be killed")
