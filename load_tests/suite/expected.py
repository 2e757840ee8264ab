"""The list of reports that are known to be stale, which can only shrink.

An entry names a report and a kind of staleness, and says why it is so. A test fails for what is stale and not
listed, for what is listed and no longer stale, and for what any earlier version of the list has not had: what
was measured and has become stale again is measured again. New rows that a scenario declares before they are
measured are the exception.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence

from load_tests.report import REPORTS
from load_tests.suite.freshness import Freshness, Kind

FILE = REPORTS / "expected_stale.toml"
Expected = dict[tuple[str, Kind], str]
"""The reason by report and kind."""


def parse_expected(text: str) -> Expected:
    """Read the list. Raise TOMLDecodeError."""
    return {
        (report, kind): reason
        for report, kinds in tomllib.loads(text).items()
        for kind, reason in kinds.items()
    }


def unexpected(found: Iterable[Freshness], expected: Expected) -> dict[tuple[str, Kind], str]:
    """What is stale and not expected, with the reason."""
    return {key: why for key, why in _stale(found).items() if key not in expected}


def not_needed(found: Iterable[Freshness], expected: Expected) -> list[tuple[str, Kind]]:
    """What is expected to be stale and is not."""
    stale = _stale(found)
    return [key for key in expected if key not in stale]


def added(expected: Expected, earlier: Sequence[Expected]) -> list[tuple[str, Kind]]:
    """What any of the earlier lists has not had, other than rows."""
    return [key for key in expected if key[1] != "rows" and any(key not in each for each in earlier)]


def _stale(found: Iterable[Freshness]) -> dict[tuple[str, Kind], str]:
    return {(each.scenario.report, kind): why for each in found for kind, why in each.stale.items()}
