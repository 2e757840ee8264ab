"""CPU of a request at several checkouts: their routers run at the same time and are measured in turn.

A run of one commit after a run of another compares two states of the machine. Here every batch of requests
goes to each router before the next batch begins, in alternating order, so that drift affects all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from load_tests.scenarios.gateway.bodies import SIZES, WARM
from load_tests.scenarios.gateway.measure import Samples, fill, say, warm_up
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.processes import Child
from load_tests.scenarios.gateway.systems import Stand, System, await_serving
from load_tests.vocabulary import large_model

BLOCKS = 100_000
WARM_UP_SCALE = 0.3


def request_costs(trees: Sequence[Path], folder: Path, rounds: int) -> dict[Path, list[dict[str, float]]]:
    """By checkout, for each round the CPU seconds of 1,000 requests by row name. Each checkout serves the two
    arrangements of the gateway benchmark: one pool, and prefill and decode apart. Raise ProcessError."""
    samples = Samples()
    with Stand(folder, large_model(), Packages()) as stand:
        client = stand.client()
        systems: dict[tuple[Path, bool], System] = {}
        for apart in (False, True):
            for tree in trees:
                systems[tree, apart] = stand.kvasir(apart=apart, tree=tree)
        for (_, apart), system in systems.items():
            await_serving(client, system)
            if not apart:
                fill(system, BLOCKS)
        warm_up(client, list(systems.values()), samples, WARM_UP_SCALE)
        found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
        # The first round fills caches and heaps.
        for number in range(rounds + 1):
            say(f"requests, round {number} of {rounds}")
            costs = _round(client, systems, forward=number % 2 == 0)
            if number:
                for tree in trees:
                    found[tree].append(costs[tree])
    return found


def _round(
    client: Child, systems: Mapping[tuple[Path, bool], System], *, forward: bool
) -> dict[Path, dict[str, float]]:
    client.ask({"do": "round", "scale": 1.0})
    costs: dict[Path, dict[str, float]] = {tree: {} for tree, _ in systems}
    order = list(systems.items())
    for size in (*SIZES, WARM):
        for (tree, apart), system in order if forward else order[::-1]:
            figures = client.ask(system.order("requests", size=size.name))
            if "error" in figures:
                say(f"  {system.name}: {size.name}: {figures['error']}")
                continue
            name = f"request, {size.name}{', kvasir-apart' if apart else ''}"
            costs[tree][name] = 1000.0 * figures["cpu_s"] / figures["count"]
    return costs
