"""What was tried for the rows that miss their target: a reader of a miss learns whether anybody looked into
it, and does not try the same again.

`misses.toml` has a text by report and pattern of rows, and MISSES.md is made from it and from the reports. A
test fails for a missed row without a text, for a text without a missed row, and for an old page.

    python -m load_tests.suite.misses        writes the page
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from load_tests.report import REPORTS, Row, read, target_of, value_of

FILE = REPORTS / "misses.toml"
PAGE = REPORTS / "MISSES.md"
Tried = Mapping[str, Mapping[str, str]]
"""By report, and by pattern of rows."""


def parse_tried(text: str) -> Tried:
    """Read the texts. Raise TOMLDecodeError."""
    found: Tried = tomllib.loads(text)
    return found


def missed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that miss their target."""
    return [row for row in rows if row.met is False]


def unexplained(reports: Mapping[str, Sequence[Row]], tried: Tried) -> list[str]:
    """Return the missed rows without a text, or with several."""
    return [
        f"{report}: {row.name}"
        for report, rows in reports.items()
        for row in missed(rows)
        if sum(fnmatchcase(row.name, pattern) for pattern in tried.get(report, ())) != 1
    ]


def not_missed(reports: Mapping[str, Sequence[Row]], tried: Tried) -> list[str]:
    """Return the patterns of texts that no missed row has."""
    return [
        f"{report}: {pattern}"
        for report, texts in tried.items()
        for pattern in texts
        if not _matching(reports.get(report, ()), pattern)
    ]


def page(reports: Mapping[str, Sequence[Row]], tried: Tried) -> str:
    """Return the page of all missed rows."""
    aimed = [row for rows in reports.values() for row in rows if row.met is not None]
    lines = [
        "# Rows that miss their target",
        "",
        f"{len(missed(aimed))} of {len(aimed)} rows with a target miss it."
        " `python -m load_tests.suite.misses` makes this page of the reports and of misses.toml, which says"
        " what was tried.",
    ]
    for report, texts in tried.items():
        lines += ["", f"## [{report}]({report}.md)"]
        for pattern, text in texts.items():
            lines += ["", "| row | value | target | commit |", "| --- | ---: | ---: | --- |"]
            for row in _matching(reports.get(report, ()), pattern):
                commit = "" if row.run is None else f"`{row.run.commit}`"
                lines.append(f"| {row.name} | {value_of(row)} | {target_of(row)} | {commit} |")
            lines += ["", text.strip()]
    return "\n".join(lines) + "\n"


def _matching(rows: Sequence[Row], pattern: str) -> list[Row]:
    return [row for row in missed(rows) if fnmatchcase(row.name, pattern)]


def committed() -> dict[str, list[Row]]:
    """Return the rows of all reports, by name."""
    return {path.stem: read(path) for path in sorted(REPORTS.glob("*.json"))}


if __name__ == "__main__":
    PAGE.write_text(page(committed(), parse_tried(FILE.read_text())))
    print(PAGE)
