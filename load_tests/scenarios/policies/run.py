"""Kvasir's routing policy compared with every other policy, on recorded traffic, in virtual time.

A trace is replayed at increasing speed on simulated workers with finite caches, through the router's own
index, accounting and policies. Goodput is the highest speed-up at which at least 90 % of the requests meet
the TTFT and mean ITL of the SLO, to 0.5 %. The other figures are measured at one speed-up for all policies,
four fifths of the best other policy's goodput. Load is the engine time of the prompt tokens that a worker
computed and of the tokens that it generated, maximum over mean within a pool; of a prefill and a decode pool,
the larger of the two.

Nothing is known in advance: the caches of a fleet hold 28 % of its trace's distinct blocks, routers expect as
many output tokens as in production, and begin with rates that are wrong by a random factor, which is the same
for all policies. Our policy runs at its defaults, the others at their published ones, and the main systems
also at the best point of a grid of their parameters, found on 16 workers; the target is over the best of all.
Fleets of more than 4 workers go without the policies that are far below the others on 4: round_robin,
session, consistent_hash, prefix and production_stack.

    make bench-policies TRACE=mooncake_conversation.jsonl AZURE=azure_2023_conv.csv
    make bench-policies TRACE=… ARGS='--workers 4 --policies cost,sglang --no-report'
    make bench-policies TRACE=… ARGS=--quick         a few hundred requests, as a smoke test

The traces (Mooncake, FAST 2025, Apache-2.0; Azure 2023, CC-BY) are not in this repository; that of sessions,
RAG and agents mixed is generated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvasir import native
from load_tests.report import Row, write
from load_tests.scenarios.policies.fleets import CACHED, SEED, Fleet, facts, memory_note
from load_tests.scenarios.policies.grid import GRIDS, OURS, POLICIES, Contender, defaults
from load_tests.scenarios.policies.measure import (
    MUST_BALANCE,
    MUST_HIT,
    PRECISION,
    Table,
    Targets,
    best_peer,
    compare,
    goodput_row,
    speeds_of,
    tune,
)

SIZES = (4, 16, 64)
ALL_UP_TO = 4
"""The largest fleet with every policy."""
APART = (12, 4)
TUNED_ON = 16
FAR_BELOW = ("round_robin", "session", "consistent_hash", "prefix", "production_stack")
NEAR = tuple(name for name in POLICIES if name not in FAR_BELOW)
APART_NAMES = tuple(name for name in NEAR if name != "power_of_two")
MIXED_NAMES = (*NEAR, "session", "consistent_hash")
WITHOUT_PREFIXES = tuple(name for name in NEAR if name != "mooncake")
STRONGEST = 3
"""Comparators of the variants of a fleet."""
WHOLE, SEPARATE = Targets(hit=MUST_HIT, balance=MUST_BALANCE), Targets(balance=MUST_BALANCE)
MIXED_PER_WORKER, AZURE_PER_WORKER = 1.0, 0.6
QUICK = 400
"""Requests of a quick run."""
QUICK_PRECISION = 0.1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl")
    parser.add_argument("--azure", type=Path, help="azure_2023_conv.csv, for a table without prefixes")
    parser.add_argument("--workers", type=int, action="append", help="fleet size (repeatable); 4, 16 and 64")
    parser.add_argument(
        "--policies",
        help="names, separated by commas, at their defaults, for fleets of whole workers only; all",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} requests, 4 workers, no report")
    parser.add_argument("--no-report", action="store_true", help="print, and write no report")
    parser.add_argument("--processes", type=int, default=2, help="concurrent replays (2)")
    args = parser.parse_args(argv)
    if not native.IS_NATIVE and not args.quick:
        sys.exit("the native extension is not built: make install")
    for path in (args.trace, args.azure):
        if path is not None and not path.is_file():
            sys.exit(f"{path}: no such file; traces are in their publishers' repositories")
    args.names = args.policies.split(",") if args.policies else None
    if unknown := [name for name in args.names or () if name not in POLICIES]:
        sys.exit(f"no policy {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    return args


def quick(pool: ProcessPoolExecutor, trace: Path) -> Iterator[list[Row]]:
    """A small grid and a small comparison."""
    fleet = Fleet(trace, 4, requests=QUICK)
    grid, best = tune(pool, fleet, {"llm_d": {"prefix_weight": (3.0, 6.0)}}, "4 workers", QUICK_PRECISION)
    contenders = (*defaults((OURS, "llm_d", "round_robin")), *best)
    known = _per_worker(grid, fleet)
    yield compare(
        pool, fleet, contenders, "4 workers", targets=WHOLE, known=known, precision=QUICK_PRECISION
    ).rows
    yield grid.rows


def measure(pool: ProcessPoolExecutor, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Every requested table, one after the other."""
    if args.names:
        for workers in args.workers or SIZES:
            fleet, contenders = Fleet(args.trace, workers), defaults(args.names)
            yield compare(pool, fleet, contenders, f"{workers} workers", targets=WHOLE, known={}).rows
        return
    grid, best = tune(pool, Fleet(args.trace, TUNED_ON), GRIDS, f"{TUNED_ON} workers")
    known = _per_worker(grid, Fleet(args.trace, TUNED_ON))
    strongest: list[Contender] = []
    for workers in args.workers or SIZES:
        fleet = Fleet(args.trace, workers)
        contenders = (*defaults(POLICIES if workers <= ALL_UP_TO else NEAR), *best)
        table = compare(pool, fleet, contenders, f"{workers} workers", targets=WHOLE, known=known)
        known |= _per_worker(table, fleet)
        if workers == TUNED_ON:
            strongest = _strongest(contenders, table.speeds)
        yield table.rows
    yield grid.rows
    if strongest:
        yield robustness(pool, args.trace, strongest, known)
    apart = Fleet(args.trace, 0, apart=APART)
    label = "{} prefill + {} decode".format(*APART)
    contenders = (*defaults(APART_NAMES), *best)
    yield compare(pool, apart, contenders, label, targets=SEPARATE, known=known).rows
    mixed = Fleet(None, 16, per_worker=MIXED_PER_WORKER)
    contenders = (*defaults(MIXED_NAMES), *best)
    yield compare(pool, mixed, contenders, "mixed, 16 workers", targets=Targets(), known={}).rows
    if args.azure is not None:
        azure = Fleet(args.azure, 16, per_worker=AZURE_PER_WORKER)
        tuned = tuple(each for each in best if each.policy in WITHOUT_PREFIXES)
        contenders = (*defaults(WITHOUT_PREFIXES), *tuned)
        yield compare(pool, azure, contenders, "Azure, 16 workers", targets=Targets(), known={}).rows


def robustness(
    pool: ProcessPoolExecutor, path: Path, peers: Sequence[Contender], known: Mapping[str, float]
) -> list[Row]:
    """Whether the lead holds when the assumptions change: 16 workers."""
    variants = {
        "another seed": Fleet(path, 16, seed=SEED + 1),
        "half the caches": Fleet(path, 16, cached=CACHED / 2),
        "halves of the trace swapped": Fleet(path, 16, swapped=True),
    }
    rows = []
    for change, fleet in variants.items():
        label, contenders = f"16 workers, {change}", (*defaults((OURS,)), *peers)
        speeds = speeds_of(pool, fleet, contenders, label, known=known, precision=PRECISION)
        best = best_peer(speeds)
        beside = ", ".join(each.name for each in peers)
        note = f"beside {beside}; the best is {best}; {memory_note(fleet)}"
        rows.append(replace(goodput_row(OURS, label, speeds, best), note=note))
    return rows


def _per_worker(table: Table, fleet: Fleet) -> dict[str, float]:
    return {name: speed / fleet.size for name, speed in table.speeds.items() if speed}


def _strongest(contenders: Sequence[Contender], speeds: Mapping[str, float]) -> list[Contender]:
    """Those with the highest goodput, each set of parameters once."""
    distinct = {(each.policy, each.point): each for each in contenders if each.name != OURS}
    return sorted(distinct.values(), key=lambda each: -speeds[each.name])[:STRONGEST]


def main(argv: Sequence[str]) -> list[Row]:
    """Measure, and write the report or print it. The report is written after every table, so that an
    interrupted run keeps its results."""
    args = parse(argv)
    known = facts(Fleet(args.trace, 4, requests=QUICK if args.quick else None))
    azure = "" if args.azure is None else f" AZURE={args.azure.name}"
    rows: list[Row] = []
    with ProcessPoolExecutor(args.processes) as pool:
        for table in quick(pool, args.trace) if args.quick else measure(pool, args):
            if not rows:
                table[0] = replace(table[0], note=f"{table[0].note}. {known}")
            rows += table
            if not (args.no_report or args.quick):
                write("policies", f"make bench-policies TRACE={args.trace.name}{azure}", rows)
    if args.no_report or args.quick:
        for row in rows:
            ratio = "" if row.ratio is None else f"({row.ratio:.3f})"
            print(f"{row.name}: {row.value:.4g} {row.unit} {ratio}")
    return rows
