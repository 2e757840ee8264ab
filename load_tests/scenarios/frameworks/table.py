"""The table of client frameworks in docs/API.md, made of the report."""

from __future__ import annotations

from collections.abc import Sequence

from load_tests.report import Row
from load_tests.scenarios.frameworks.suites import ROOT

PAGE = ROOT / "docs" / "API.md"
BEGIN, END = "<!-- frameworks: made by make frameworks-check -->", "<!-- frameworks: end -->"
_HEAD = """\
| framework | scripted model: passed, skipped | kvasir-tiny: passed, refused, failed |
|---|---|---|"""


def merged(earlier: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """Return the rows of a report with those that were found, in the place of those of their names and of
    other versions of their frameworks."""
    versions = dict(_framework(row) for row in found)
    names = {row.name for row in found}
    kept = [
        row
        for row in earlier
        if row.name not in names and versions.get(_framework(row)[0]) in (None, _framework(row)[1])
    ]
    return [*kept, *found]


def table(rows: Sequence[Row]) -> str:
    """Return the table of the rows of the report."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        framework, _, rest = row.name.rpartition(", ")
        cells.setdefault(framework, {})[rest] = row
    lines = [_HEAD]
    for framework, by in cells.items():
        skipped = by["scripted model: passed"].note.partition(" ")[0] or "0"
        tiny = [by.get(f"kvasir-tiny: {what}") for what in ("passed", "refused", "failed")]
        shown = ", ".join(f"{row.value:g}" for row in tiny if row is not None)
        lines.append(f"| {framework} | {by['scripted model: passed'].value:g}, {skipped} | {shown} |")
    return "\n".join(lines)


def with_table(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the table of the rows between its marks. Raises ValueError without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no marks: {BEGIN}")
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}"


def write_table(rows: Sequence[Row]) -> None:
    """Write the table into docs/API.md."""
    PAGE.write_text(with_table(PAGE.read_text(), rows))


def _framework(row: Row) -> tuple[str, str]:
    """Return the framework of a row and its version."""
    framework, _, version = row.name.rpartition(", ")[0].rpartition(" ")
    return framework, version
