"""How many lines of a batch run, and how soon a refused one is sent again."""

from __future__ import annotations

import pytest

from kvasir_platform.gateway.batches.pace import LinePace


def test_each_line_that_ends_lets_one_more_run_up_to_the_most() -> None:
    pace = LinePace(lambda: 10)
    for _ in range(50):
        while pace.wait_s(0.0) == 0.0:
            pace.started()
        pace.ended()
    assert pace.running == 9
    pace.started()
    assert pace.wait_s(0.0) is None


def test_refusals_lower_the_number_to_what_runs_and_are_tried_again_later_and_later() -> None:
    pace, now, waits = LinePace(lambda: 64), 0.0, []
    for _ in range(3):
        pace.started()
    for _ in range(8):
        pace.started()
        pace.refused(now)
        wait_s = pace.wait_s(now)
        assert wait_s is not None
        waits.append(wait_s)
        now += wait_s
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.02, 1.0)
    pace.started()
    assert pace.wait_s(now) is None


def test_a_line_that_ends_makes_the_next_try_come_soon() -> None:
    pace, now = LinePace(lambda: 64), 0.0
    for _ in range(6):
        pace.started()
        pace.refused(now)
        now += pace.wait_s(now) or 0.0
    pace.started()
    pace.ended()
    pace.started()
    pace.refused(now)
    assert pace.wait_s(now) == pytest.approx(0.02)
