"""The path of a request at several checkouts: their routers run at the same time and are measured in turn.

A run of one commit after a run of another compares two states of the machine. Here every measurement is made
of each router before the next one begins, in alternating order, so that drift affects all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from load_tests.scenarios.gateway.bodies import SIZES, WARM
from load_tests.scenarios.gateway.measure import (
    DELTAS_A_MESSAGE,
    Samples,
    chunk_name,
    fill,
    one_round,
    say,
    ttft,
    warm_up,
)
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.rows import chunk_title
from load_tests.scenarios.gateway.systems import Stand, System, await_serving
from load_tests.vocabulary import large_model

BLOCKS = 100_000
SCALE = 0.5
WARM_UP_SCALE = 0.3
_UNITS = {"request": "CPU s/1k", "chunk": "CPU µs", "ttft": "ms"}


def path_costs(trees: Sequence[Path], folder: Path, rounds: int) -> dict[Path, list[dict[str, float]]]:
    """By checkout, for each round its figures by row name, in the unit of `unit_of`. Each checkout serves the
    two arrangements of the gateway benchmark: one pool, and prefill and decode apart. Raise ProcessError."""
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    with Stand(folder, large_model(), Packages()) as stand:
        client = stand.client()
        direct = stand.direct()
        systems = [
            (tree, apart, stand.kvasir(apart=apart, tree=tree)) for apart in (False, True) for tree in trees
        ]
        for _, apart, system in systems:
            await_serving(client, system)
            if not apart:
                fill(system, BLOCKS)
        warm_up(client, [system for _, _, system in systems], Samples(), WARM_UP_SCALE)
        # The first round fills caches and heaps.
        for number in range(rounds + 1):
            say(f"routers, round {number} of {rounds}")
            systems.reverse()
            samples = Samples()
            ttft(client, direct, samples, SCALE)
            one_round(client, [system for _, _, system in systems], samples, SCALE)
            for tree in trees if number else ():
                mine = [(apart, system) for at, apart, system in systems if at == tree]
                found[tree].append(_costs(samples, direct, mine))
    return found


def unit_of(row: str) -> str:
    """The unit of a row of `path_costs`."""
    return _UNITS[row.partition(",")[0]]


def _costs(samples: Samples, direct: System, systems: Sequence[tuple[bool, System]]) -> dict[str, float]:
    """The rows of one checkout in one round; a measurement that failed has none."""
    rows: dict[str, float] = {}
    for apart, system in systems:
        name, end = system.name, ", kvasir-apart" if apart else ""
        for title, what in [*((each.name, each.name) for each in (*SIZES, WARM)), ("100 B, alone", "ttft")]:
            for cost in samples.cpu(name, what, "count"):
                rows[f"request, {title}{end}"] = 1e3 * cost
        for deltas in DELTAS_A_MESSAGE:
            for cost in samples.cpu(name, chunk_name(deltas), "tokens"):
                rows[f"{chunk_title(deltas)}{end}"] = 1e6 * cost
        for through, bare in zip(samples.of(name, "ttft"), samples.of(direct.name, "ttft"), strict=False):
            rows[f"ttft, added{end}"] = 1e3 * (through["ttft_s"] - bare["ttft_s"])
    return rows
