"""What the bench of models keeps between runs: cells of each part of a model in a file, and the report.

A checkout without those files has the report, whose cells stay for what was not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from tests.kit.models.architectures import MODELS

from load_tests.report import Row, Run
from load_tests.scenarios.models.results import COLUMNS, Cell, Verdict

PARTS = {"engines": COLUMNS[:5], "up": COLUMNS[5:]}
"""The columns that each part of a run fills."""

Cells = dict[str, Cell]


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A cell of `model` and the run that measured it."""

    model: str
    column: str
    cell: Cell
    run: Run


def keep(folder: Path, model: str, part: str, cells: Cells, run: Run) -> None:
    """Write the cells of one part; the report may be made in another run."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {"run": asdict(run), "cells": {column: asdict(cell) for column, cell in cells.items()}}
    kept_file(folder, model, part).write_text(json.dumps(shown, indent=1) + "\n")


def kept_file(folder: Path, model: str, part: str) -> Path:
    """Return the file of one part of one model."""
    return folder / f"{model}.{part}.cells.json"


def all_cells(folder: Path, report: Iterable[Row]) -> list[MeasuredCell]:
    """Return the cells of all models, in the order of MODELS and COLUMNS: those of the files in `folder`, and
    of the report for every part without a file."""
    found: dict[tuple[str, str], MeasuredCell] = {}
    for each in map(_from_row, report):
        found[each.model, each.column] = each
    for model in MODELS:
        for part, columns in PARTS.items():
            path = kept_file(folder, model.name, part)
            if not path.exists():
                continue
            stored = json.loads(path.read_text())
            for column in columns:
                found.pop((model.name, column), None)
            for column, cell in stored["cells"].items():
                measured = MeasuredCell(model.name, column, Cell(**cell), Run(**stored["run"]))
                found[model.name, column] = measured
    places = [(model.name, column) for model in MODELS for column in COLUMNS]
    return [found[place] for place in places if place in found]


def to_rows(cells: Sequence[MeasuredCell]) -> list[Row]:
    """Return the rows of the report. A note begins with the verdict, so that the cell can be read back."""
    return [
        Row(
            f"{each.model}, {each.column}",
            float(each.cell.verdict == "yes"),
            "works",
            "higher",
            note=": ".join(filter(None, (each.cell.verdict, each.cell.note))),
            run=each.run,
        )
        for each in cells
    ]


def _from_row(row: Row) -> MeasuredCell:
    """Raise ValueError for a row that this program did not write."""
    model, _, column = row.name.partition(", ")
    verdict, _, note = row.note.partition(": ")
    for known in get_args(Verdict):
        if verdict == known and row.run is not None:
            return MeasuredCell(model, column, Cell(known, note), row.run)
    raise ValueError(f"{row.name}: the note names no verdict, or there is no run: {row.note[:40]}")
