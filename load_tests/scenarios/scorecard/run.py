"""Run the scorecard, row by row: fault, proof that it happened, promise, figure.

    make scorecard                      every row that can run here
    make scorecard ARGS="--rows 1,4"    only these; the other rows of the report are kept
    make scorecard ARGS="--seed 7"      with other prompts, arrivals and faults

Each row is a module in a sub-package of load_tests/scenarios/scorecard. A row that fails does not stop the
others.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from load_tests.report import REPORTS, Row, read, write
from load_tests.scenarios.scorecard.common import Figure, Trial

ROWS: dict[int, str] = {
    1: "SIGKILL of a decode worker",
    2: "SIGKILL of a prefill worker",
    3: "KV transfer stalls, is cut, has a flipped bit",
    4: "SIGSTOP of one worker in eight",
    5: "partition of ten seconds",
    6: "a router is killed",
    7: "KV events are lost, repeated, reordered",
    8: "a tier is killed, stopped, slow, full, read-only",
    9: "garbage, old and foreign blobs in a tier",
    10: "overload, greedy tenants, long prompts",
    11: "every worker answers 503",
    12: "most workers unhealthy, or loads stale",
    13: "rolling restarts",
    14: "a cold worker joins",
    15: "client disconnects",
    16: "slow readers",
    17: "slow and oversized requests",
    18: "malformed requests, also through a proxy",
    19: "a tenant probes the cache of another",
    20: "wrong or expired certificates",
    21: "URLs that lead inside",
    22: "secrets and dependencies",
    23: "simulated failures replay",
    24: "a long mixed load",
}
FOLDERS: dict[str, tuple[int, ...]] = {
    "workers": (1, 2, 3, 4, 5, 6, 7),
    "tiers": (8, 9),
    "fleet": (10, 11, 12, 13, 14, 23, 24),
    "clients": (15, 16, 17, 18),
    "security": (19, 20, 21, 22),
}
"""The rows of each sub-package."""
ROW_S = 1800.0
_NAME = re.compile(r"row (\d+): ")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one row: figures, or the reason why there are none, and the promise."""

    number: int
    figures: tuple[Figure, ...] = ()
    problem: str = ""
    promise: str = ""


def module_of(number: int) -> str:
    """Import the module that measures a row of ROWS."""
    folder = next(folder for folder, numbers in FOLDERS.items() if number in numbers)
    return f"load_tests.scenarios.scorecard.{folder}.row{number:02d}"


async def measure(number: int, seed: int) -> Result:
    """Run one row. Any failure becomes its result."""
    module: Any = importlib.import_module(module_of(number))
    with tempfile.TemporaryDirectory(prefix="kvasir-scorecard-") as folder:
        try:
            async with asyncio.timeout(ROW_S):
                figures = await module.measure(Trial(Path(folder), seed))
        # A failure affects this row only; the other rows are still measured.
        except Exception as error:  # noqa: BLE001
            problem = f"{type(error).__name__}: {error}"
            return Result(number, problem=problem, promise=module.PROMISE)
    return Result(number, tuple(figures), promise=module.PROMISE)


def report_rows(result: Result, seed: int) -> list[Row]:
    """The result in the report's format. A row without figures counts as not met."""
    head = f"row {result.number}: {ROWS[result.number]}"
    if result.problem:
        return [Row(head, 1.0, "failures", "lower", target=0.0, note=result.problem[:500], seeds=(seed,))]
    return [
        Row(
            f"{head}, {figure.what}",
            figure.value,
            figure.unit,
            figure.better,
            target=figure.target,
            note="; ".join(
                filter(None, (figure.note, f"promise: {result.promise}" if result.promise else ""))
            ),
            seeds=(seed,),
        )
        for figure in result.figures
    ]


def kept(path: Path, measured: Sequence[int]) -> list[Row]:
    """Rows of the existing report that were not measured in this run."""
    return [row for row in read(path) if _number(row) not in (0, *measured)]


def save(rows: Sequence[Row], measured: Sequence[int]) -> Path:
    """Write the report, keeping existing rows that were not measured."""
    everything = [*kept(REPORTS / "scorecard.json", measured), *rows]
    everything.sort(key=_number)
    return write("scorecard", "make scorecard", everything)


def _number(row: Row) -> int:
    number = _NAME.match(row.name)
    return int(number[1]) if number else 0


def show(rows: Sequence[Row]) -> None:
    """Print figures."""
    for row in rows:
        met = {True: "met", False: "NOT MET", None: ""}[row.met]
        target = "" if row.target is None else f" (promised {row.target:g})"
        print(f"    {row.name}: {row.value:.4g} {row.unit}{target} {met}")
        if row.note:
            print(f"        {row.note}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="numbers, as in 1,4,13; by default all that can be measured")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, arrivals and networks")
    parser.add_argument("--no-report", action="store_true", help="show figures and write nothing")
    args = parser.parse_args()
    numbers = list(ROWS) if args.rows is None else [int(each) for each in args.rows.split(",")]
    if unknown := [each for each in numbers if each not in ROWS]:
        parser.error(f"no such row: {unknown}; there are {', '.join(map(str, ROWS))}")
    rows: list[Row] = []
    failed = False
    for number in numbers:
        began = time.monotonic()
        print(f"row {number}: {ROWS[number]}", flush=True)
        result = uvloop.run(measure(number, args.seed))
        made = report_rows(result, args.seed)
        show(made)
        print(f"    {time.monotonic() - began:.0f} s", flush=True)
        failed = failed or any(row.met is False for row in made)
        rows += made
        if not args.no_report:
            save(rows, [int(_number(row)) for row in rows])
    return 1 if failed else 0
