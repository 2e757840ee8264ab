"""The format of a report: NAME.json for programs, and NAME.md for people, generated from it.

    python -m load_tests.report load_tests/reports/foundation.json

regenerates the table from the JSON.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

REPORTS = Path(__file__).parent / "reports"
_WRITTEN = ("load_tests/reports", "docs/MODELS.md")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `peer` is the same figure of a peer or a floor in the same run, and `ratio` is value/peer.
    With `seeds` the row can be reproduced. `commit` is what was measured; empty until the row is written."""

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
    commit: str = ""

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


def median(samples: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and the (minimum, maximum) of the samples. Raise ValueError if there are none."""
    if not samples:
        raise ValueError("no samples")
    return statistics.median(samples), (min(samples), max(samples))


def write(name: str, command: str, rows: Sequence[Row], commit: str = "") -> Path:
    """Write NAME.json and NAME.md; return the path of the JSON. `commit` is what was measured, by default the
    checkout as it is. Rows that were read from a report keep theirs."""
    commit = commit or checkout()
    report = {
        "command": command,
        "commit": commit,
        "machine": machine(),
        "rows": [asdict(row) | {"commit": row.commit or commit, "met": row.met} for row in rows],
    }
    path = REPORTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    render(path)
    return path


def read(path: Path) -> list[Row]:
    """The rows of a report with the commit of each, or none if it does not exist."""
    if not path.exists():
        return []
    found = []
    report = json.loads(path.read_text())
    for stored in report["rows"]:
        values = {key: stored[key] for key in Row.__slots__ if key in stored}
        values["commit"] = stored.get("commit") or report.get("commit", "")
        values["seeds"] = tuple(stored.get("seeds", ()))
        values["spread"] = None if stored.get("spread") is None else tuple(stored["spread"])
        found.append(Row(**values))
    return found


def render(path: Path) -> Path:
    """Write the table beside a report."""
    report = json.loads(path.read_text())
    lines = [
        f"# {path.stem}",
        "",
        f"`{report['command']}` at commit `{report['commit']}` on {report['machine']}.",
        "",
        "| figure | value | spread | better | target | peer | ratio | met |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | --- |",
    ]
    lines += [_line(row) for row in report["rows"]]
    notes = [f"- {row['name']}: {note}" for row in report["rows"] if (note := _note(row, report["commit"]))]
    if notes:
        lines += ["", "Notes", "", *notes]
    table = path.with_suffix(".md")
    table.write_text("\n".join(lines) + "\n")
    return table


def _note(row: dict[str, Any], commit: str) -> str:
    own = row.get("commit") or commit
    at = "" if own == commit else f"measured at `{own}`"
    return "; ".join(each for each in (at, row.get("note")) if each)


def _line(row: dict[str, object]) -> str:
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
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def checkout(folder: Path = Path(__file__).parent) -> str:
    """The commit of the checkout with `folder`, with `+changes` if files differ from it, other than those
    that benchmarks write."""
    commit = _git(folder, "rev-parse", "--short", "HEAD") or "unknown"
    written = [f":(top,exclude){path}" for path in _WRITTEN]
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":(top)", *written)
    return f"{commit}+changes" if changed else commit


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


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(render(Path(argument)))
