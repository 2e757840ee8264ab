"""What is measured of the policies on one fleet, and the rows that come of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from kvasir_platform.sim.replay.goodput import Search, goodput
from kvasir_platform.sim.replay.replay import TraceReplay
from kvasir_router.decide import Disaggregation
from load_tests.report import Row
from load_tests.scenarios.policies.fleets import Fleet, memory_note, setting
from load_tests.scenarios.policies.grid import OURS, Contender, Point, chosen, describe, points

PRECISION, ROUGH = 0.005, 0.03
"""Of goodput, relative: of what is compared, and of the points of grids."""
WIDE, NARROW = 1.25, 1.04
"""Factors between the speed-ups that searches try first, without and with an estimate."""
COMMON = 0.8
MUST, MUST_HIT, MUST_BALANCE = 1.05, 0.9, 1.1


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of our policy on a fleet, beside that of goodput."""

    hit: float | None = None
    balance: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy on one fleet at one speed-up. `predicted` is the share of requests whose hit equals the
    router's prediction."""

    met: float
    hit_rate: float
    predicted: float
    imbalance: float
    ttft_p50_s: float
    ttft_p99_s: float


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one fleet, and the goodput of each policy."""

    rows: list[Row]
    speeds: dict[str, float]


def _mode(fleet: Fleet) -> Disaggregation:
    return Disaggregation.ALWAYS if any(fleet.apart) else Disaggregation.NEVER


def best_speed(fleet: Fleet, contender: Contender, search: Search) -> tuple[float, float]:
    """The policy's goodput, 0 if it never meets the SLO, and the CPU seconds of the search."""
    began = time.process_time()
    try:
        found = goodput(setting(fleet, 1.0), lambda: contender.make(_mode(fleet), fleet.seed), search)
    except ValueError:
        found = 0.0
    return found, time.process_time() - began


def at_speed(fleet: Fleet, contender: Contender, speed_up: float) -> Figures:
    """Replay all requests with the policy at that speed-up."""
    played = setting(fleet, speed_up)
    outcome = TraceReplay(played, contender.make(_mode(fleet), fleet.seed)).run()
    return Figures(
        met=outcome.met,
        hit_rate=outcome.hit_rate(played.trace),
        predicted=outcome.correct_predictions / len(played.trace.requests),
        imbalance=outcome.imbalance(),
        ttft_p50_s=outcome.ttft_quantile_s(0.5),
        ttft_p99_s=outcome.ttft_quantile_s(0.99),
    )


def speeds_of(
    pool: ProcessPoolExecutor,
    fleet: Fleet,
    contenders: Sequence[Contender],
    label: str,
    *,
    known: Mapping[str, float],
    precision: float,
) -> dict[str, float]:
    """The goodput of each. Those with equal parameters are measured once. `known` are estimates of their
    speed-ups per worker, by name."""
    searches = {}
    for each in contenders:
        start = fleet.size * known.get(each.name, fleet.per_worker)
        search = Search(precision=precision, start=start, step=NARROW if each.name in known else WIDE)
        if (each.policy, each.point) not in searches:
            searches[each.policy, each.point] = pool.submit(best_speed, fleet, each, search)
    speeds: dict[str, float] = {}
    for each in contenders:
        speeds[each.name], spent = searches[each.policy, each.point].result()
        say(f"{label}: {each.name}: goodput {speeds[each.name]:.4g} ({spent:.0f} s of CPU)")
    return speeds


def compare(
    pool: ProcessPoolExecutor,
    fleet: Fleet,
    contenders: Sequence[Contender],
    label: str,
    *,
    targets: Targets,
    known: Mapping[str, float],
    precision: float = PRECISION,
) -> Table:
    """Compare the policies on one fleet."""
    speeds = speeds_of(pool, fleet, contenders, label, known=known, precision=precision)
    best = best_peer(speeds)
    common = COMMON * speeds[best or OURS]
    runs = {}
    for each in contenders:
        if (each.policy, each.point) not in runs:
            runs[each.policy, each.point] = pool.submit(at_speed, fleet, each, common)
    rows = []
    for each in contenders:
        row = goodput_row(each.name, label, speeds, best if each.name == OURS else None)
        notes = (row.note, memory_note(fleet) if each.name == OURS else "", _how(each))
        rows.append(replace(row, note="; ".join(filter(None, notes))))
    for each in contenders:
        figures = runs[each.policy, each.point].result()
        bound = targets if each.name == OURS else Targets()
        rows += _at_common(f"{each.name}, {label}, speed-up {common:.3g}", figures, fleet, bound)
    say(f"{label}: all at {common:.3g} x")
    return Table(rows, speeds)


def best_peer(speeds: Mapping[str, float]) -> str | None:
    """The comparator with the highest goodput, None if there is none."""
    return max((name for name in speeds if name != OURS), key=speeds.__getitem__, default=None)


def goodput_row(name: str, label: str, speeds: Mapping[str, float], best: str | None) -> Row:
    """The row of a policy's goodput, with the target if `best` is what it is compared with."""
    row = Row(f"goodput, {name}, {label}", speeds[name], "x", "higher")
    if best is None:
        return row
    return replace(
        row,
        peer=speeds[best],
        ratio=speeds[name] / speeds[best] if speeds[best] else None,
        target_ratio=MUST,
        note=f"the best comparator is {best}",
    )


def _how(contender: Contender) -> str:
    return contender.parameters if contender.tuned else ""


def _at_common(at: str, figures: Figures, fleet: Fleet, targets: Targets) -> list[Row]:
    rows = [
        Row(f"load max/mean, {at}", figures.imbalance, "", "lower", targets.balance),
        Row(f"TTFT p50, {at}", figures.ttft_p50_s, "s", "lower"),
        Row(f"TTFT p99, {at}", figures.ttft_p99_s, "s", "lower"),
        Row(f"requests that met the promise, {at}", figures.met, "", "higher"),
    ]
    if not fleet.shares:
        return rows
    hits = Row(f"hits of an infinite cache's, {at}", figures.hit_rate, "", "higher", targets.hit)
    return [hits, *rows, Row(f"requests whose hit was foreseen, {at}", figures.predicted, "", "higher")]


def tune(
    pool: ProcessPoolExecutor,
    fleet: Fleet,
    grids: Mapping[str, Mapping[str, Sequence[float]]],
    label: str,
    precision: float = ROUGH,
) -> tuple[Table, tuple[Contender, ...]]:
    """Measure every point of the grids, and return the best of each policy."""
    search = Search(precision=precision, start=fleet.size * fleet.per_worker, step=WIDE)
    searches = {
        policy: {
            point: pool.submit(best_speed, fleet, Contender(policy, policy, point), search)
            for point in points(grid)
        }
        for policy, grid in grids.items()
    }
    rows: list[Row] = []
    speeds: dict[str, float] = {}
    best: list[Contender] = []
    for policy, of_policy in searches.items():
        found: dict[Point, float] = {point: each.result()[0] for point, each in of_policy.items()}
        rows += [
            Row(f"grid, {policy}, {describe(point)}, {label}", speed, "x", "higher")
            for point, speed in found.items()
        ]
        best.append(chosen(policy, found))
        speeds[policy], speeds[best[-1].name] = next(iter(found.values())), max(found.values())
        say(f"grid, {policy}: {best[-1].parameters}: {speeds[best[-1].name]:.4g}")
    return Table(rows, speeds), tuple(best)


def say(line: str) -> None:
    """Print progress."""
    sys.stderr.write(line + "\n")
