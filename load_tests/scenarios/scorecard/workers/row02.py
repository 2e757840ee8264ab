"""SIGKILL of a prefill worker while it computes, while its blocks are leased, and after the hand-off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, LabWorker, Layout
from tests.kit.lab.invariants import at_rest
from tests.kit.lab.load import asks, tally
from tests.kit.lab.stream import Outcome, Stream, open_stream

from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    engine,
    exactness,
    exercise,
    finished,
    split,
)

PROMISE = "recomputed elsewhere"
ORPHANS_S = 5.0


@dataclass(frozen=True, slots=True)
class Size:
    """`rounds` kills in each state, `streams` sent at each; `real`: the same with vLLM."""

    prefill: int = 3
    decode: int = 2
    rounds: int = 4
    streams: int = 12
    tokens: int = 30
    real: bool = True


def _computes(view: dict[str, Any], streams: list[Stream]) -> bool:
    return bool(view["in_flight"] and (view["load"] or {}).get("running"))


def _leases(view: dict[str, Any], streams: list[Stream]) -> bool:
    return bool((view["load"] or {}).get("kv_blocks_leased"))


def _handed_off(view: dict[str, Any], streams: list[Stream]) -> bool:
    return not view["in_flight"] and all(stream.outcome.times_s for stream in streams)


STATES: dict[str, Callable[[dict[str, Any], list[Stream]], bool]] = {
    "computing": _computes,
    "leased": _leases,
    "handed off": _handed_off,
}


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    outcomes: list[Outcome] = []
    rests: list[float] = []
    deployment = split(
        prefill=engine(sim={"prefill_tokens_per_s": 2_000.0}),
        decode=engine(sim={"transfer_latency_s": 0.3}),
    )
    layout = Layout({"prefill": size.prefill, "decode": size.decode})
    async with exercise(trial, deployment, layout) as fleet:
        for turn in range(size.rounds * len(STATES)):
            state = list(STATES)[turn % len(STATES)]
            victim, ended = await _kill(trial, fleet, size, state, turn)
            outcomes += ended
            rests.append(await at_rest(fleet, 4 * ORPHANS_S))
            trial.say(f"{state}: {tally(ended).exact} of {len(ended)} exact {tally(ended).errors or ''}")
            await fleet.start_worker(victim)
            await fleet.all_ready()
    real: list[Figure] = []
    if size.real:
        trial.say("the same with real vLLM: four engines are starting")
        async with real_engines.stage(trial.folder) as stage:
            real = (await real_engines.prefill_worker_killed(stage)).figures()
    note = f"{size.rounds} kills in each state: {', '.join(STATES)}"
    return [
        exactness(outcomes, note),
        Figure(
            "until no block is leased and nothing accounted for",
            max(rests),
            "s",
            "lower",
            ORPHANS_S,
            "longest, after the last stream had ended",
        ),
        *real,
    ]


async def _kill(
    trial: Trial, fleet: Fleet, size: Size, state: str, turn: int
) -> tuple[LabWorker, list[Outcome]]:
    """Kill the first prefill worker that is in `state`; return it and the results of all streams."""
    work = asks(trial.rng(turn), 256, size.tokens)
    streams = [await open_stream(fleet.address, next(work), fleet.clock) for _ in range(size.streams)]
    victims: list[LabWorker] = []
    worked: set[str] = set()

    async def reached() -> bool:
        views = await gateway.workers(fleet.address)
        for worker in fleet.pool("prefill"):
            view = views[worker.address]
            if view["in_flight"]:
                worked.add(worker.name)
            if worker.name in worked and STATES[state](view, streams):
                victims.append(worker)
        return bool(victims)

    try:
        await gateway.until(reached, 10.0, f"a prefill worker is {state}", fleet.clock, 0.002)
    except TimeoutError as error:
        raise NotProven(str(error)) from error
    await victims[0].running.kill()
    return victims[0], await finished(streams)
