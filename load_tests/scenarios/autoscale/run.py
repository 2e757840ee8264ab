"""Cost of a day with autoscaling: Kvasir's planner compared with common scaling rules.

A day of traffic runs through a prefill and a decode pool in virtual time, request by request, while a scaler
decides the number of replicas of each. All of a replica's time is counted: while it starts (two minutes),
serves, and drains. The scaler with the fewest replica-hours wins, provided that at least 99 % of the requests
meet the TTFT and mean ITL of the SLO.

There are two days: a slow wave from night to afternoon, and one with fourteen additional bursts, each within
minutes. No scaler is told what comes. Kvasir's planner runs once, with its defaults. Each rival is tuned with
hindsight for that very day and seed: of all its settings the cheapest that meets the 99 % counts, and the
search continues around it in finer steps than an operator would use. A rival's figure is therefore a lower
bound of what its kind of rule costs.

    make bench-autoscale TRACE=mooncake_conversation.jsonl
    make bench-autoscale TRACE=… ARGS='--seeds 8,9 --days wave --rivals hpa,queue --no-report'
    make bench-autoscale TRACE=… ARGS=--quick         half an hour instead of days, as a smoke test
    make bench-autoscale TRACE=… ARGS='--keep /tmp/rivals.jsonl'

The last one caches the rivals' results and reuses them the next time: tuning them is nearly all of the work.
They are tuned again when the fleet, the days, the rivals, this file or the trace have changed. Kvasir's
planner always runs.

Requests are drawn from the trace (Mooncake, FAST 2025, Apache-2.0; not in this repository), each with the
part of its prompt that one infinite cache would not have. Replicas have the performance of the test bed that
the trace was published with, and the SLO is that of its authors: 30 s TTFT and 0.1 s ITL.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

from kvasir_platform.sim.replay.replica import a800_node
from kvasir_platform.sim.scaling.days import DAY_S, Day
from kvasir_platform.sim.scaling.fleet import ScaledFleet
from kvasir_platform.sim.scaling.rivals import Hpa
from kvasir_platform.workload.files import read_mooncake
from load_tests.report import Row, write
from load_tests.scenarios.autoscale.days import DAYS, OURS, QUICK_S, SEEDS, Case, Outcome, ours
from load_tests.scenarios.autoscale.rivals import RIVALS, Trials, rival
from load_tests.scenarios.autoscale.rows import facts, rows_of


def say(line: str) -> None:
    """Print progress."""
    sys.stderr.write(line + "\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl")
    parser.add_argument("--seeds", help="separated by commas; " + ",".join(map(str, SEEDS)))
    parser.add_argument("--days", help="separated by commas; " + ",".join(DAYS))
    parser.add_argument("--rivals", help="separated by commas; " + ",".join(RIVALS))
    parser.add_argument("--quick", action="store_true", help="half an hour, one seed, no report")
    parser.add_argument("--no-report", action="store_true", help="print, and write no report")
    parser.add_argument("--keep", type=Path, help="cache file of the rivals' results")
    parser.add_argument("--processes", type=int, default=2, help="concurrent simulations (2)")
    args = parser.parse_args(argv)
    if not args.trace.is_file():
        sys.exit(f"{args.trace}: no such file; the trace is in its publisher's repository")
    try:
        args.seeds = [int(each) for each in args.seeds.split(",")] if args.seeds else list(SEEDS)
    except ValueError:
        sys.exit(f"--seeds {args.seeds}: not numbers, separated by commas")
    for name, known in (("days", DAYS), ("rivals", tuple(RIVALS))):
        chosen = getattr(args, name)
        named = chosen.split(",") if chosen else list(known)
        if unknown := [each for each in named if each not in known]:
            sys.exit(f"--{name}: no {', '.join(unknown)}; there are {', '.join(known)}")
        setattr(args, name, named)
    return args


class Kept:
    """A cache of rivals' results in a file of JSON lines; does nothing without a file."""

    def __init__(self, path: Path | None, trace: Path) -> None:
        self._path = path
        self._of = _digest(trace) if path is not None else ""
        self._found: dict[tuple[str, str, int, float], Outcome] = {}
        if path is None or not path.exists():
            return
        for line in path.read_text().splitlines():
            stored = json.loads(line)
            if stored.pop("of") == self._of:
                who, day, seed, length_s = stored.pop("case")
                self._found[who, day, seed, length_s] = Outcome(**stored)

    def get(self, case: Case, who: str) -> Outcome | None:
        """Return a stored result, if any."""
        return self._found.get((who, case.day, case.seed, case.length_s))

    def add(self, case: Case, who: str, found: Outcome) -> None:
        """Store a result."""
        if self._path is not None and who != OURS and self.get(case, who) is None:
            stored = {"of": self._of, "case": [who, case.day, case.seed, case.length_s]}
            with self._path.open("a") as lines:
                lines.write(json.dumps(stored | asdict(found)) + "\n")


def _digest(trace: Path) -> str:
    """A digest of everything that a rival's result depends on."""
    sources = {
        inspect.getfile(each) for each in (Case, Trials, ScaledFleet, Day, Hpa, a800_node, read_mooncake)
    }
    digest = hashlib.sha256()
    for path in (*sorted(map(Path, sources)), trace):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def measure(pool: ProcessPoolExecutor, args: argparse.Namespace) -> dict[str, dict[str, dict[int, Outcome]]]:
    """All results, by day, scaler and seed."""
    seeds, length_s = (args.seeds[:1], QUICK_S) if args.quick else (args.seeds, DAY_S)
    found: dict[str, dict[str, dict[int, Outcome]]] = {
        day: {who: {} for who in (OURS, *args.rivals)} for day in args.days
    }
    kept = Kept(args.keep, args.trace)
    tasks: dict[Future[Outcome], tuple[Case, str]] = {}
    # Longest first. A day is generated again for each of its tasks, which takes a second.
    for who in (*args.rivals, OURS):
        for case in (Case(args.trace, day, seed, length_s) for day in args.days for seed in seeds):
            before = kept.get(case, who)
            if before is not None:
                found[case.day][who][case.seed] = before
            else:
                future = pool.submit(ours, case) if who == OURS else pool.submit(rival, case, who)
                tasks[future] = case, who
    for future in as_completed(tasks):
        case, who = tasks[future]
        each = found[case.day][who][case.seed] = future.result()
        kept.add(case, who, each)
        say(
            f"{case.day}, seed {case.seed}: {who}: {each.hours:.0f} h, {100 * each.kept:.2f} %, at most "
            f"{each.most} alive, {each.starts} starts ({each.setting}; {each.runs} runs)"
        )
    return found


def main(argv: Sequence[str]) -> list[Row]:
    """Measure, and write the report or print it."""
    args = parse(argv)
    with ProcessPoolExecutor(args.processes) as pool:
        found = measure(pool, args)
    rows = [row for day in args.days for row in rows_of(day, found[day])]
    rows[0] = replace(rows[0], note=f"{rows[0].note}. {facts(args.trace)}")
    if args.no_report or args.quick:
        for row in rows:
            ratio = "" if row.ratio is None else f"({row.ratio:.3f})"
            print(f"{row.name}: {row.value:.4g} {row.unit} {ratio} {row.note}")
    else:
        write("autoscale", f"make bench-autoscale TRACE={args.trace.name}", rows)
    return rows
