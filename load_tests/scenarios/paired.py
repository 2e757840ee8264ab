"""The benchmarks of a request's path at two commits, in turn on one machine.

Figures of different days or machines do not show whether a change made the path slower. This scenario checks
out both commits into worktrees, builds their native extensions, and runs their own benchmarks alternately:
A B A B. For `routers`, which replaces those rows of the gateway benchmark, the routers of both run at the
same time, and each measurement is made of both in turn. Each row is the median at the second commit, with the
median at the first as its peer; its ratio is the median of the rounds' ratios. A second copy of the second
commit is measured beside its routers: the `control` rows, without a target, are this copy against the other,
and show by how much equal code differs in such a run.

    make bench-paired BASE=070af0e                         the base and the last commit of this checkout
    make bench-paired BASE=070af0e ARGS='--rounds 1 --only gateway,edge'

Both commits run with the packages of this checkout's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from load_tests.report import REPORTS, Row, median, read, write
from load_tests.scenarios.gateway.in_turn.alternating import path_costs, unit_of
from load_tests.scenarios.gateway.processes import ProcessError
from load_tests.scenarios.gateway.systems import packages_of
from load_tests.vocabulary import large_model

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 2
ROUTERS = "routers"
CONTROL = "control"
MORE_ROUNDS: Mapping[str, int] = {ROUTERS: 4, "edge": 3, "tokenizing": 2, "index": 2}
"""Rounds for each round of the others: of the shorter, noisier measurements."""
SCENARIO_S = 900.0
SCENARIOS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("--quick", "--peers", "none"),
    "edge": (),
    "tokenizing": (),
    "index": ("--quick", "--no-peer"),
}
"""Arguments of each benchmark. A quick run prints its rows; the others write a report."""
NAMES = (ROUTERS, *SCENARIOS)
ROWS = (ROUTERS, CONTROL, *SCENARIOS)
_PRINTED = re.compile(r"^(?P<name>[^:]+): (?P<value>[\d.e+-]+) (?P<unit>[^(]*?) *\(target ", re.MULTILINE)
_LOWER = ("CPU", "ms", "us", "µs", "ns", "MB", "MiB", "B", "s")


class Figure(NamedTuple):
    """One row of one run."""

    value: float
    unit: str
    better: str


class BenchmarkError(Exception):
    """A benchmark did not run at one of the commits."""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextlib.contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of the commit with its native extension built; removed at the end."""
    _git("worktree", "add", "--detach", "--quiet", str(folder), commit)
    try:
        _run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], folder)
        shutil.copytree(large_model(), folder / "build" / "vocabulary")
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _run(command: Sequence[str], tree: Path) -> str:
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, **packages_of(tree)},
        capture_output=True,
        text=True,
        timeout=SCENARIO_S,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)} at {tree.name}: {done.stderr[-2000:]}")
    return done.stdout


def printed(text: str) -> dict[str, Figure]:
    """The figures of a quick run, as it prints them."""
    return {
        found["name"]: Figure(
            float(found["value"]),
            found["unit"],
            "lower" if found["unit"].startswith(_LOWER) else "higher",
        )
        for found in _PRINTED.finditer(text)
    }


def figures(scenario: str, tree: Path) -> dict[str, Figure]:
    """Run a benchmark of `tree`. Raise BenchmarkError if it fails."""
    arguments = SCENARIOS[scenario]
    text = _run([sys.executable, "-m", f"load_tests.scenarios.{scenario}", *arguments], tree)
    if "--quick" in arguments:
        return printed(text)
    report = tree / "load_tests" / "reports" / f"{scenario}.json"
    return {row.name: Figure(row.value, row.unit, row.better) for row in read(report)}


def rows_of(
    scenario: str, base: Sequence[Mapping[str, Figure]], head: Sequence[Mapping[str, Figure]]
) -> list[Row]:
    """The rows that both commits have, in the order of the second."""
    rows = []
    for name, first in head[0].items():
        pairs = [(b[name], h[name]) for b, h in zip(base, head, strict=True) if name in b and name in h]
        if first.unit == "cores" or not pairs or any(before.value <= 0 for before, _ in pairs):
            continue
        value, spread = median([after.value for _, after in pairs])
        ratios = [after.value / before.value for before, after in pairs]
        rows.append(
            Row(
                f"{scenario}: {name}",
                value,
                first.unit,
                "higher" if first.better == "higher" else "lower",
                peer=statistics.median(before.value for before, _ in pairs),
                ratio=statistics.median(ratios),
                target_ratio=None if scenario == CONTROL else 1.0,
                spread=spread,
                note=f"the rounds' ratios: {', '.join(f'{each:.3f}' for each in ratios)}",
            )
        )
    return rows


def measure(scenarios: Sequence[str], trees: tuple[Path, Path, Path], rounds: int) -> list[Row]:
    """All rows, `rounds` rounds of the base and the head in turn. `trees` are the base, the head and its
    copy."""
    found: dict[tuple[str, Path], list[dict[str, Figure]]] = defaultdict(list)
    replaced: set[str] = set()
    if ROUTERS in scenarios:
        with tempfile.TemporaryDirectory(prefix="kvasir-paired-") as folder:
            costs = path_costs(trees, Path(folder), MORE_ROUNDS[ROUTERS] * rounds)
        for tree, each_round in costs.items():
            replaced.update(*each_round)
            for row in each_round:
                found[ROUTERS, tree].append(
                    {name: Figure(value, unit_of(name), "lower") for name, value in row.items()}
                )
    base, head, copy = trees
    alone = [each for each in SCENARIOS if each in scenarios]
    for number in range(rounds):
        for scenario in [each for each in alone for _ in range(MORE_ROUNDS.get(each, 1))]:
            for tree in (base, head):
                sys.stderr.write(f"round {number + 1}: {scenario} at {tree.name}\n")
                measured = figures(scenario, tree)
                if scenario == "gateway":
                    measured = {name: each for name, each in measured.items() if name not in replaced}
                found[scenario, tree].append(measured)
    rows = [
        row
        for each in NAMES
        if each in scenarios
        for row in rows_of(each, found[each, base], found[each, head])
    ]
    return rows + (
        rows_of(CONTROL, found[ROUTERS, head], found[ROUTERS, copy]) if ROUTERS in scenarios else []
    )


def others(report: Path, command: str, scenarios: Sequence[str]) -> list[Row]:
    """The rows of other scenarios in the last report, if its command compared with the same base."""
    if not report.exists() or json.loads(report.read_text())["command"] != command:
        return []
    replaced = {*scenarios, CONTROL} if ROUTERS in scenarios else {*scenarios}
    return [row for row in read(report) if _scenario(row) not in replaced]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order of the scenarios."""
    return sorted(rows, key=lambda row: ROWS.index(_scenario(row)))


def _scenario(row: Row) -> str:
    return row.name.partition(":")[0]


def main() -> None:
    """Measure, write the report and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--head", default="HEAD", help="the commit that is compared (the last one)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"runs of each commit ({ROUNDS})")
    parser.add_argument(
        "--only",
        default=",".join(NAMES),
        help=f"some of {','.join(NAMES)}; the report keeps its rows of the others",
    )
    parser.add_argument("--no-report", action="store_true", help="print, and write no report")
    args = parser.parse_args()
    scenarios = args.only.split(",")
    if unknown := [each for each in scenarios if each not in NAMES]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    try:
        base, head = (_git("rev-parse", "--short", f"{each}^{{commit}}") for each in (args.base, args.head))
    except subprocess.CalledProcessError as error:
        parser.error(f"no such commit: {error.stderr.strip()}")
    with tempfile.TemporaryDirectory(prefix="kvasir-paired-") as folder, contextlib.ExitStack() as stack:
        places = {f"{base}-base": base, f"{head}-head": head, f"{head}-copy": head}
        trees = [stack.enter_context(checked_out(each, Path(folder) / name)) for name, each in places.items()]
        try:
            rows = measure(scenarios, (trees[0], trees[1], trees[2]), args.rounds)
        except (BenchmarkError, ProcessError) as error:
            sys.exit(str(error))
    if args.no_report:
        for row in rows:
            compared = f"{row.value:.4g} {row.unit}, base {row.peer:.4g}, ratio {row.ratio:.3f}"
            print(f"{row.name}: {compared}; {row.note}")
        return
    command = f"make bench-paired BASE={base}"
    rows = in_order([*rows, *others(REPORTS / "paired.json", command, scenarios)])
    report = write("paired", command, rows, head)
    print(report.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
