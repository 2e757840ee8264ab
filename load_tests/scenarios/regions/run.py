"""A day over five regions in virtual time: Kvasir's choice of a cell, the nearest one, and each in turn.

Five regions have the same wave of requests at their own times of day, bursts of their own, and prices that
differ. In each, the production planner sizes a pool of replicas to the load that it gets, and all of their
time is paid, while they start and drain as well. One region is lost for an hour, and another one cannot reach
the others for an hour. A part of the tenants has data residency, and one is limited over all regions.

What is production code: which cell serves (`choose`), reports and how long they hold, what runs again after a
loss and when, the limit that cells share, and the planner. Replicas have the times of the performance model.
All of them know from the same reports which regions are lost, and repeat requests alike. The figures of
Kvasir are those of its defaults, for which prices do not count; beside it is what a weight of prices changes.

    make bench-regions
    make bench-regions ARGS='--hours 3 --no-report'
    make bench-regions ARGS='--seed 2 --only kvasir --no-report'
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from load_tests.report import write
from load_tests.scenarios.regions.day import RegionDay
from load_tests.scenarios.regions.results import DayFigures, figures_of
from load_tests.scenarios.regions.rows import rows_of
from load_tests.scenarios.regions.selection import OURS, SELECTIONS
from load_tests.scenarios.regions.world import World, traffic_of

SEED = 71


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(text + "\n")


def measure(names: Sequence[str], world: World, seed: int) -> dict[str, DayFigures]:
    """Run the day once for each way to choose."""
    traffic = traffic_of(world, seed)
    found = {}
    for name in names:
        began = time.perf_counter()
        found[name] = figures_of(RegionDay(world, traffic, SELECTIONS[name]()).run())
        say(f"{name}: {time.perf_counter() - began:.0f} s for {len(traffic):,} requests")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the report or print it. Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=24.0, help="of the day from midnight UTC (24)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the traffic ({SEED})")
    parser.add_argument("--only", choices=tuple(SELECTIONS), help="one way to choose, without a report")
    parser.add_argument("--no-report", action="store_true", help="only print")
    args = parser.parse_args(argv)
    names = (args.only,) if args.only else tuple(SELECTIONS)
    found = measure(names, World(length_s=args.hours * 3600.0), args.seed)
    if OURS not in found:
        say("\n".join(f"{name}: {day}" for name, day in found.items()))
        return 0
    rows = rows_of(found, args.seed)
    for row in rows:
        ratio = "" if row.ratio is None else f"({row.ratio:.3f})"
        say(f"{row.name}: {row.value:.4g} {row.unit} {ratio} {row.note}")
    if not (args.no_report or args.only):
        write("regions", "make bench-regions", rows)
    return int(any(row.met is False for row in rows))
