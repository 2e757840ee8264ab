"""What observing costs a router as `kvasir up` starts it: with all of it on and with all of it off, in turn.

Two processes of the same router differ by a few percent in the CPU of a request for as long as they live, as
the memory that they were given differs. So all routers are started several times, and each time they run
together: each measurement is made of all of them before the next one begins, in another order each time, so
that drift of the machine affects all alike. A ratio is one of a router and of two with everything off, of one
start; the median over all starts is compared with the target. The second router with everything off, beside
the first, shows by how much equal routers differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from load_tests.report import Row, median
from load_tests.scenarios.gateway.bodies import SIZES
from load_tests.scenarios.gateway.measure import Figures, Samples, chunk_name, chunks, say, warm_up
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.processes import ProcessError
from load_tests.scenarios.gateway.systems import Stand, await_serving
from load_tests.vocabulary import large_model

STARTS = 16
MOST_RATIO = 1.05
MOST_TRACES = 100_000
"""More traces a second than any router here begins."""
DELTAS = 32
BEGINNING = "observability, "
"""How the names of these rows begin."""
_SHORT = SIZES[0]
_WARM_UP_SCALE = 0.5
_REQUEST_PASSES = 9
_CHUNK_PASSES = 2
_PASS_SCALE = 1 / 3
"""Part of the requests or the seconds of a measurement: the shorter each is, the less the machine's speed
differs between routers."""
_MEASURED = ((_SHORT.name, "count", "CPU µs a request"), (chunk_name(DELTAS), "tokens", "CPU µs a chunk"))
_NOTES = {
    "default": "traces are exported as they are by default; peer: everything off",
    "traced": "every trace is exported; peer: everything off",
    "control": "a second router with everything off; peer: the first",
}


def observability_rows(folder: Path, *, starts: int, scale: float) -> list[Row]:
    """All rows; `scale` shortens each measurement. Raise ProcessError."""
    found = []
    for number in range(starts):
        say(f"observability, start {number + 1} of {starts}")
        within = folder / f"start-{number}"
        within.mkdir()
        found.append(_measured(within, number, scale))
    return rows_of(found)


def _measured(folder: Path, number: int, scale: float) -> Samples:
    """What routers that are started for it cost, by their kind. Raise ProcessError."""
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
        warm_up(client, list(systems.values()), samples, _WARM_UP_SCALE)
        order = turned(list(systems), number)
        there_and_back = (*order, *reversed(order))
        client.ask({"do": "round", "scale": scale * _PASS_SCALE})
        for kind in there_and_back * _REQUEST_PASSES:
            samples.add(kind, _SHORT.name, client.ask(systems[kind].order("requests", size=_SHORT.name)))
        for kind in there_and_back * _CHUNK_PASSES:
            samples.add(kind, chunk_name(DELTAS), chunks(client, systems[kind], DELTAS, scale * _PASS_SCALE))
    if samples.wrong:
        raise ProcessError("; ".join(f"{what}: {why}" for what, why in samples.wrong.items()))
    return samples


def _mean(samples: Sequence[Figures], of: str) -> float:
    """Return the CPU seconds for each of what was counted. A median would leave out what happens every few
    seconds, as exports of traces do."""
    return float(sum(each["cpu_s"] for each in samples) / sum(each[of] for each in samples))


def turned(kinds: Sequence[str], number: int) -> list[str]:
    """Return the kinds in the order of a start: over twice as many starts as kinds, each is at each place
    twice."""
    start = number // 2 % len(kinds)
    order = [*kinds[start:], *kinds[:start]]
    return order[::-1] if number % 2 else order


def rows_of(starts: Sequence[Samples]) -> list[Row]:
    """Return a row of each figure of each kind of router, from the samples of each start by kind."""
    rows = []
    for what, of, unit in _MEASURED:
        cpu = {kind: [_mean(each.of(kind, what), of) * 1e6 for each in starts] for kind in ("off", *_NOTES)}
        both = [(one + other) / 2 for one, other in zip(cpu["off"], cpu["control"], strict=True)]
        for kind, note in _NOTES.items():
            value, spread = median(cpu[kind])
            off = cpu["off"] if kind == "control" else both
            ratio, ratios = median([each / other for each, other in zip(cpu[kind], off, strict=True)])
            rows.append(
                Row(
                    f"{BEGINNING}{what}, {kind}",
                    value,
                    unit,
                    "lower",
                    peer=median(off)[0],
                    ratio=ratio,
                    target_ratio=MOST_RATIO if kind == "default" else None,
                    spread=spread,
                    note=f"{note}; median of {len(starts)} starts, ratios {ratios[0]:.3f} to {ratios[1]:.3f}",
                )
            )
    return rows
