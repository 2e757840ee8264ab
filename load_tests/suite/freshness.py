"""Whether a report is fresh: all declared rows, at commits of the history, of files that hardly changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from load_tests.report import CHANGES, UNKNOWN, Row
from load_tests.suite.scenario import Scenario

Kind = Literal["commit", "rows", "files"]
_SHOWN = 3


class KnownHistory(Protocol):
    """What is asked of the history of HEAD."""

    def contains(self, commit: str) -> bool:
        """Whether the commit is HEAD or before it."""
        ...

    def committed(self, commit: str) -> datetime:
        """When the commit was made."""
        ...

    def changed_lines(self, commit: str, globs: Sequence[str]) -> int:
        """The lines that differ between the commit and HEAD in files under these globs."""
        ...


@dataclass(frozen=True, slots=True)
class Freshness:
    """The state of one report: its rows and how many of the declared ones it has, when the oldest of its
    known commits was made, and why it is stale, by kind. Undeclared rows are an error of the table, and make
    no report stale."""

    scenario: Scenario
    rows: int
    missing: tuple[str, ...]
    undeclared: tuple[str, ...]
    commits: tuple[str, ...]
    oldest: datetime | None
    stale: dict[Kind, str]

    @property
    def fresh(self) -> bool:
        """Whether nothing is wrong with any row."""
        return not self.stale


def freshness(scenario: Scenario, rows: Sequence[Row], history: KnownHistory) -> Freshness:
    """Judge the rows of a report."""
    measured = Counter(row.run.commit for row in rows if row.run is not None)
    known = {each: _known(each, history) for each in measured}
    stale: dict[Kind, str] = {}
    wrong: dict[str, list[str]] = {}
    for each, why in known.items():
        wrong.setdefault(why, []).append(each)
    wrong.pop("", None)
    if wrong:
        stale["commit"] = "; ".join(
            f"{sum(measured[each] for each in commits)} rows at {', '.join(commits)}, {why}"
            for why, commits in wrong.items()
        )
    missing = scenario.missing(row.name for row in rows)
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        stale["rows"] = f"missing: {'; '.join(missing[:_SHOWN])}{more}"
    good = [each for each, why in known.items() if not why]
    changed = {each: history.changed_lines(each, scenario.paths) for each in good}
    far = {each: lines for each, lines in changed.items() if lines > scenario.lines}
    if far:
        shown = ", ".join(f"{lines:,} since {each}" for each, lines in far.items())
        stale["files"] = f"changed lines: {shown}; allowed are {scenario.lines:,}"
    return Freshness(
        scenario,
        len(rows),
        missing,
        scenario.undeclared(row.name for row in rows),
        tuple(measured),
        min((history.committed(each) for each in good), default=None),
        stale,
    )


def _known(commit: str, history: KnownHistory) -> str:
    """Why the commit does not say what was measured, or nothing."""
    if commit.startswith(UNKNOWN):
        return "which is not known"
    if commit.endswith(CHANGES):
        return "with changes that no commit has"
    return "" if history.contains(commit) else "which is not in the history"
