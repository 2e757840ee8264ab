"""CPU of a request at several checkouts: their routers run at the same time and are measured in turn.

A run of one commit after a run of another compares two states of the machine. Here every batch of requests
goes to each router before the next batch begins, in alternating order, so that drift affects all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from load_tests.scenarios.gateway.bodies import SIZES, WARM
from load_tests.scenarios.gateway.measure import Samples, fill, say, warm_up
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.systems import Stand, System, await_serving
from load_tests.vocabulary import large_model

BLOCKS = 100_000
WARM_UP_SCALE = 0.3


def request_costs(trees: Sequence[Path], folder: Path, rounds: int) -> dict[Path, list[dict[str, float]]]:
    """By checkout, for each round the CPU seconds of 1,000 requests by row name. Each checkout serves the two
    arrangements of the gateway benchmark: one pool, and prefill and decode apart. Raise ProcessError."""
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    with Stand(folder, large_model(), Packages()) as stand:
        client = stand.client()
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
            say(f"requests, round {number} of {rounds}")
            client.ask({"do": "round", "scale": 1.0})
            systems.reverse()
            samples = Samples()
            for size in (*SIZES, WARM):
                for _, _, system in systems:
                    asked = system.order("requests", size=size.name)
                    samples.add(system.name, size.name, client.ask(asked))
            for tree in trees if number else ():
                found[tree].append(_costs(samples, [each for each in systems if each[0] == tree]))
    return found


def _costs(samples: Samples, systems: Sequence[tuple[Path, bool, System]]) -> dict[str, float]:
    """The rows of one checkout in one round; a batch that failed has none."""
    return {
        f"request, {size.name}{', kvasir-apart' if apart else ''}": 1000.0 * cost
        for size in (*SIZES, WARM)
        for _, apart, system in systems
        for cost in samples.cpu(system.name, size.name, "count")
    }
