"""Tables of the suite for a terminal: the state of all reports, and the rows that miss their target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from kvasir_platform.cli.common.output import table
from load_tests.report import Row, target_of, value_of
from load_tests.suite.freshness import Freshness
from load_tests.suite.misses import missed
from load_tests.suite.run import Outcome

_MOST_COMMITS = 2


def state_table(states: Sequence[Freshness], now: datetime) -> str:
    """One line for each report: rows, age, commits, minutes, and whether it is fresh, with the reason."""
    lines = []
    for each in states:
        declared = len(each.scenario.rows)
        have = f"{each.rows}" if not each.missing else f"{declared - len(each.missing)} of {declared}"
        commits = ", ".join(each.commits[:_MOST_COMMITS]) + (
            ", …" if len(each.commits) > _MOST_COMMITS else ""
        )
        why = "; ".join(each.stale.values())
        state = "fresh" if each.fresh else f"stale: {why}"
        lines.append(
            (each.scenario.report, have, _age(each.oldest, now), commits, f"{each.scenario.minutes}", state)
        )
    return table(("report", "rows", "age", "commit", "minutes", "state"), lines)


def state_json(states: Sequence[Freshness], now: datetime) -> list[dict[str, object]]:
    """The same for programs."""
    return [
        {
            "report": each.scenario.report,
            "rows": each.rows,
            "missing": list(each.missing),
            "undeclared": list(each.undeclared),
            "commits": list(each.commits),
            "age_days": None if each.oldest is None else (now - each.oldest).total_seconds() / 86400,
            "minutes": each.scenario.minutes,
            "fresh": each.fresh,
            "stale": dict(each.stale),
        }
        for each in states
    ]


def missed_table(reports: Mapping[str, Sequence[Row]]) -> str:
    """The rows whose target is missed."""
    lines = [
        (report, row.name, value_of(row), target_of(row))
        for report, rows in reports.items()
        for row in missed(rows)
    ]
    return table(("report", "row", "value", "target"), lines) if lines else "every row meets its target"


def outcome_line(outcome: Outcome) -> str:
    """How one scenario ended."""
    about = f"{outcome.seconds / 60:.1f} min, expected {outcome.scenario.minutes}"
    return f"{outcome.scenario.report}: {outcome.problem or 'measured'} ({about})"


def _age(oldest: datetime | None, now: datetime) -> str:
    if oldest is None:
        return "?"
    hours = (now - oldest).total_seconds() / 3600
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} d"
