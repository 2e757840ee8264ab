"""How fast a place computes prompts, by what it has done of late."""

from __future__ import annotations

import pytest

from kvasir_router.columns import PromptPace


def test_prompts_that_are_done_together_are_computed_in_the_time_of_one() -> None:
    one_by_one, together = PromptPace(), PromptPace()
    for number in range(30):
        apart = one_by_one.done(100, 0.5 * (number + 1))
        for _ in range(3):
            beside = together.done(100, 0.5 * (number + 1))
    assert apart == pytest.approx(200.0)
    assert beside == pytest.approx(3 * 200.0, rel=0.15)


def test_older_prompts_count_for_less_and_less() -> None:
    pace = PromptPace(tokens=1e6, seconds=1.0)
    for number in range(200):
        rate = pace.done(50, 0.1 * (number + 1))
    assert rate == pytest.approx(500.0, rel=0.01)


def test_a_prompt_that_took_no_time_is_no_division_by_nothing() -> None:
    assert PromptPace().done(1, 0.0) > 0
