"""How long a cell is known well enough, and when a lost one is used again."""

from __future__ import annotations

import pytest

from kvasir_router.regions.reports import CellReport, ModelReport
from kvasir_router.regions.view import MAX_CELLS, CellState, RegionView, ViewRules

RULES = ViewRules(stale_s=1.75, lost_s=2.5, returns_after=3, failures=2, calm_s=60.0)


class Link:
    """Reports of one cell, once a second."""

    def __init__(self) -> None:
        self.view = RegionView(("b",), RULES)
        self.now = 0.0
        self._sequence = 0

    def hear(self, count: int = 1) -> CellState:
        for _ in range(count):
            self.now += 1.0
            self._sequence += 1
            assert self.view.heard(CellReport("b", 1, self._sequence), self.now)
        return self.state

    def wait(self, seconds: float) -> CellState:
        self.now += seconds
        return self.state

    @property
    def state(self) -> CellState:
        return self.view.state("b", self.now)


def test_a_cell_is_lost_until_its_first_report() -> None:
    link = Link()
    assert link.state is CellState.LOST
    assert "no report yet" in link.view.reason("b", 0.0)
    assert link.hear() is CellState.FRESH


def test_a_cell_without_reports_is_stale_and_then_lost() -> None:
    link = Link()
    link.hear()
    assert link.wait(1.7) is CellState.FRESH
    assert link.wait(0.1) is CellState.STALE
    assert link.wait(0.8) is CellState.LOST
    assert "no report for 2.5 s" in link.view.reason("b", link.now)


def test_one_report_makes_a_stale_cell_fresh() -> None:
    link = Link()
    link.hear()
    assert link.wait(1.0) is CellState.FRESH
    assert link.hear() is CellState.FRESH


def test_a_lost_cell_is_used_again_after_three_reports_in_a_row() -> None:
    link = Link()
    link.hear()
    assert link.wait(5.0) is CellState.LOST
    assert link.hear(2) is CellState.RETURNING
    assert "2 of 3 reports" in link.view.reason("b", link.now)
    assert link.hear() is CellState.FRESH
    assert link.view.reason("b", link.now) == ""


def test_reports_with_gaps_are_not_in_a_row() -> None:
    link = Link()
    link.hear()
    link.wait(5.0)
    link.hear(2)
    link.wait(1.5)
    assert link.hear() is CellState.RETURNING
    assert link.hear(2) is CellState.FRESH


def test_each_loss_soon_after_a_return_doubles_the_reports_that_are_needed() -> None:
    link, needed = Link(), []
    link.hear()
    for _ in range(7):
        link.wait(5.0)
        count = 1
        while link.hear() is not CellState.FRESH:
            count += 1
        needed.append(count)
    assert needed == [3, 6, 12, 24, 48, 48, 48]


def test_losses_are_forgotten_after_a_calm_minute() -> None:
    link = Link()
    link.hear()
    for _ in range(3):
        link.wait(5.0)
        link.hear(30)
    link.hear(60)
    link.wait(5.0)
    assert link.hear(2) is CellState.RETURNING
    assert link.hear() is CellState.FRESH


def test_a_cell_whose_requests_fail_is_lost_although_it_reports() -> None:
    link = Link()
    link.hear()
    link.view.failed("b", link.now)
    link.view.answered("b")
    link.view.failed("b", link.now)
    assert link.wait(0.0) is CellState.FRESH
    link.view.failed("b", link.now)
    assert link.wait(0.0) is CellState.LOST
    assert "2 requests in a row" in link.view.reason("b", link.now)
    assert link.hear(3) is CellState.FRESH


def test_old_repeated_and_unknown_reports_are_ignored() -> None:
    view = RegionView(("b",))
    assert view.heard(CellReport("b", 5, 2), 1.0)
    assert not view.heard(CellReport("b", 5, 2), 2.0)
    assert not view.heard(CellReport("b", 4, 9), 2.0)
    assert not view.heard(CellReport("c", 5, 1), 2.0)
    assert view.age_s("b", 3.0) == 2.0
    assert view.heard(CellReport("b", 6, 1), 3.0)


def test_what_was_sent_counts_until_two_reports_have_come() -> None:
    model = ModelReport("m", "r")
    link = Link()
    link.hear()
    link.view.sent("b", "m", "r", 100)
    link.view.sent("b", "m", "r", 50)
    link.view.sent("b", "m", "other", 7)
    assert link.view.pending_tokens("b", model) == 150
    link.hear()
    assert link.view.pending_tokens("b", model) == 150
    link.hear()
    assert link.view.pending_tokens("b", model) == 0


def test_a_view_has_a_bounded_number_of_cells() -> None:
    with pytest.raises(ValueError, match="limit"):
        RegionView(str(i) for i in range(MAX_CELLS + 1))
