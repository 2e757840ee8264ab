"""What observing costs: routers with all of it on and with all of it off, measured in turn.

Routers run at the same time, and each measurement is made of all of them before the next one begins, in
another order each round, so that drift of the machine affects all alike. A ratio is one of two measurements
of the same round, and the median of all ratios is compared with the target. A second router with everything
off shows by how much equal routers differ in such a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from load_tests.report import Row, median
from load_tests.scenarios.gateway.bodies import SIZES
from load_tests.scenarios.gateway.measure import Samples, chunk_name, chunks, say, warm_up
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.processes import ProcessError
from load_tests.scenarios.gateway.systems import Stand, await_serving
from load_tests.vocabulary import large_model

ROUNDS = 8
MOST_RATIO = 1.05
MOST_TRACES = 100_000
"""More traces a second than any router here begins."""
DELTAS = 32
BEGINNING = "observability, "
"""How the names of these rows begin."""
Each = TypeVar("Each")
_SHORT = SIZES[0]
_WARM_UP_SCALE = 0.5
_MEASURED = ((_SHORT.name, "count", "CPU µs a request"), (chunk_name(DELTAS), "tokens", "CPU µs a chunk"))
_NOTES = {
    "default": "traces are exported as they are by default",
    "traced": "every trace is exported",
    "control": "a second router with everything off",
}


def observability_rows(folder: Path, *, rounds: int, scale: float) -> list[Row]:
    """All rows; `scale` shortens each measurement. Raise ProcessError."""
    samples = Samples()
    with Stand(folder, large_model(), Packages()) as stand:
        client = stand.client()
        systems = {
            "off": stand.unobserved("off"),
            "default": stand.observed("default"),
            "traced": stand.observed("traced", traces_per_s=MOST_TRACES),
            "control": stand.unobserved("control"),
        }
        for system in systems.values():
            await_serving(client, system)
        warm_up(client, list(systems.values()), Samples(), _WARM_UP_SCALE)
        for number in range(rounds):
            say(f"observability, round {number + 1} of {rounds}")
            client.ask({"do": "round", "scale": scale})
            order = turned(list(systems.values()), number)
            # Requests take seconds, where chunks take half a minute, so twice and in both directions.
            for system in (*order, *reversed(order)):
                asked = client.ask(system.order("requests", size=_SHORT.name))
                samples.add(system.name, _SHORT.name, asked)
            for system in order:
                samples.add(system.name, chunk_name(DELTAS), chunks(client, system, DELTAS, scale))
    if samples.wrong:
        raise ProcessError("; ".join(f"{what}: {why}" for what, why in samples.wrong.items()))
    return rows_of(samples, {kind: system.name for kind, system in systems.items()})


def turned(systems: Sequence[Each], number: int) -> list[Each]:
    """Return the systems in the order of a round: over twice as many rounds as systems, each is at each place
    twice."""
    start = number // 2 % len(systems)
    order = [*systems[start:], *systems[:start]]
    return order[::-1] if number % 2 else order


def rows_of(samples: Samples, names: dict[str, str]) -> list[Row]:
    """Return a row of each figure of each router that is compared with the one of `off`. `names` are those of
    the routers in the samples, which have as many measurements of each."""
    rows = []
    for what, of, unit in _MEASURED:
        off = samples.cpu(names["off"], what, of)
        for kind, note in _NOTES.items():
            on = samples.cpu(names[kind], what, of)
            value, spread = median([each * 1e6 for each in on])
            ratio, ratios = median([each / other for each, other in zip(on, off, strict=True)])
            rows.append(
                Row(
                    f"{BEGINNING}{what}, {kind}",
                    value,
                    unit,
                    "lower",
                    peer=median(off)[0] * 1e6,
                    ratio=ratio,
                    target_ratio=MOST_RATIO if kind == "default" else None,
                    spread=spread,
                    note=f"{note}; peer: everything off; {len(on)} pairs, ratios {ratios[0]:.3f} to "
                    f"{ratios[1]:.3f}",
                )
            )
    return rows
