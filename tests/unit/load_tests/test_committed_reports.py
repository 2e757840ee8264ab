"""The committed reports say what was measured: rows of commits that exist, all of them, of code that is in
use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest
from load_tests.report import REPORTS
from load_tests.suite.__main__ import states
from load_tests.suite.catalog import SCENARIOS
from load_tests.suite.expected import FILE, added, not_needed, parse_expected, unexpected
from load_tests.suite.freshness import Freshness
from load_tests.suite.history import ROOT, History
from load_tests.suite.misses import FILE as MISSES
from load_tests.suite.misses import PAGE, committed, not_missed, page, parse_tried, unexplained

HISTORY = History()
MOST_SHARE = 0.1
whole_history = pytest.mark.skipif(
    not HISTORY.whole(), reason="the checkout has not the history that reports name: git fetch --unshallow"
)


@cache
def judged() -> Sequence[Freshness]:
    return states(HISTORY)


def test_every_report_has_a_scenario_that_declares_it() -> None:
    assert {path.stem for path in REPORTS.glob("*.json")} <= set(SCENARIOS)


def test_the_tables_are_imported_without_engines() -> None:
    code = (
        "import sys, load_tests.suite.catalog; print({'vllm', 'torch', 'ray', 'kvasir'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@whole_history
def test_every_row_of_a_report_is_declared_by_its_scenario() -> None:
    assert {each.scenario.report: each.undeclared for each in judged() if each.undeclared} == {}


@whole_history
def test_a_stale_report_is_measured_again_or_was_known_to_be_stale() -> None:
    found = unexpected(judged(), parse_expected(FILE.read_text()))
    assert found == {}, "run `make reports`, which measures what is stale"


@whole_history
def test_what_is_no_longer_stale_is_off_the_list() -> None:
    assert not_needed(judged(), parse_expected(FILE.read_text())) == []


@whole_history
def test_the_list_of_stale_reports_only_shrinks_except_for_rows_that_are_new() -> None:
    earlier = [parse_expected(text) for text in HISTORY.versions(str(FILE.relative_to(ROOT)))]
    assert added(parse_expected(FILE.read_text()), earlier) == [], "run `make reports`: see CONTRIBUTING.md"


@whole_history
def test_paths_exist_and_only_a_small_part_of_their_lines_may_change() -> None:
    lines = HISTORY.lines(sorted({path for each in SCENARIOS.values() for path in each.paths}))
    assert [path for path, count in lines.items() if not count] == []
    for each in SCENARIOS.values():
        assert each.lines <= MOST_SHARE * sum(lines[path] for path in each.paths), each.report


def test_what_was_tried_is_said_for_every_missed_row_and_for_no_other() -> None:
    tried = parse_tried(MISSES.read_text())
    assert unexplained(committed(), tried) == [], f"say in {MISSES.name} what was tried"
    assert not_missed(committed(), tried) == []


def test_the_page_of_misses_is_of_the_committed_reports() -> None:
    made = page(committed(), parse_tried(MISSES.read_text()))
    assert PAGE.read_text() == made, "run `python -m load_tests.suite.misses`"
