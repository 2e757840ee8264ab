"""Forecasts, and what is learned from their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.planner.forecast import (
    DAY_S,
    Corrected,
    Daily,
    Predictor,
    Steady,
    Surge,
    Trend,
    predictors,
)

STEP_S = 10.0
HORIZON_S = 60.0


class Told:
    """Foresees what it was told to make of the last value."""

    def __init__(self, make: Callable[[float], float | None], name: str = "told") -> None:
        self.name, self._make, self._last = name, make, 0.0

    def take(self, value: float, seconds: float) -> None:
        self._last = value

    def ahead(self, horizon_s: float) -> float | None:
        return self._make(self._last)


def fed(predictor: Predictor, values: Sequence[float], step_s: float = STEP_S) -> Predictor:
    for value in values:
        predictor.take(value, step_s)
    return predictor


def corrected(predictor: Predictor, values: Sequence[float]) -> Corrected:
    found = Corrected(predictor)
    for value in values:
        found.take(value, STEP_S, HORIZON_S)
    return found


# -- predictors --------------------------------------------------------------------------------------


def test_steady_foresees_what_has_been_on_average() -> None:
    assert Steady("s", 60.0).ahead(60.0) is None
    steady = fed(Steady("s", 60.0), [5.0] * 3)
    assert steady.ahead(1e9) == pytest.approx(5.0)
    assert fed(steady, [11.0] * 6).ahead(60.0) == pytest.approx(5.0 + 6.0 * (1 - math.exp(-1)))


def test_a_load_that_has_just_left_behind_what_it_was_goes_on_to_rise_by_as_much_again() -> None:
    assert Surge("s", 300.0).ahead(60.0) is None
    calm = fed(Surge("s", 300.0), [10.0] * 60)
    assert calm.ahead(60.0) == pytest.approx(10.0)
    risen = fed(calm, [16.0] * 3).ahead(60.0)
    usual = fed(Steady("s", 300.0), [10.0] * 60 + [16.0] * 3).ahead(60.0)
    assert usual is not None
    assert risen == pytest.approx(16.0 + (16.0 - usual))


@pytest.mark.parametrize("value", [11.0, 4.0], ids=["a little more", "less"])
def test_what_is_no_surge_is_foreseen_to_be_as_it_was_on_average(value: float) -> None:
    values = [10.0] * 60 + [value] * 3
    assert fed(Surge("s", 300.0), values).ahead(60.0) == fed(Steady("s", 300.0), values).ahead(60.0)


def test_a_load_that_exceeds_noise_by_little_is_foreseen_to_rise_by_little() -> None:
    def foreseen(value: float) -> float | None:
        return fed(Surge("s", 1e6), [*[100.0] * 60, *[value] * 4]).ahead(60.0)

    assert foreseen(119.0) == pytest.approx(100.0, abs=0.1)
    assert foreseen(121.0) == pytest.approx(104.0, abs=0.1)
    assert foreseen(130.0) == pytest.approx(140.0, abs=0.1)
    assert foreseen(150.0) == pytest.approx(200.0, abs=0.1)


@pytest.mark.parametrize("step_s", [5.0, 10.0, 60.0])
def test_a_surge_that_lasts_becomes_usual_however_often_it_is_looked_at(step_s: float) -> None:
    surge = fed(Surge("s", 120.0), [10.0] * 100 + [20.0] * int(900 / step_s), step_s)
    assert surge.ahead(60.0) == pytest.approx(20.0, rel=0.02)


def test_a_trend_goes_on_to_rise_the_less_the_further() -> None:
    trend = fed(Trend("t", 60.0, 120.0, 300.0), [float(second) for second in range(0, 1200, 10)])
    near, far, end = (trend.ahead(horizon_s) for horizon_s in (60.0, 600.0, 1e9))
    assert near is not None
    assert far is not None
    assert end is not None
    assert 1190 + 40 < near < 1190 + 60
    assert near < far < end < 1190 + 310


def test_a_load_that_falls_is_not_foreseen_to_fall_on_for_it_is_the_highest_that_counts() -> None:
    trend = fed(Trend("t", 60.0, 120.0, 300.0), [float(value) for value in range(1000, 100, -10)])
    assert trend.ahead(600.0) == trend.ahead(0.0)


def test_nothing_is_known_of_yesterday_on_the_first_day() -> None:
    assert fed(Daily(), [1.0] * 60, 60.0).ahead(600.0) is None


def test_it_is_as_yesterday_times_what_today_has_been_beside_it() -> None:
    minutes = int(DAY_S / 60)
    yesterday = [10.0] * (minutes // 2) + [50.0] * (minutes // 2)
    daily = fed(Daily(), yesterday + [20.0] * (minutes // 2 - 5), 60.0)
    assert daily.ahead(120.0) == pytest.approx(20.0)
    # The highest of what lies within the horizon, where yesterday's noon is.
    assert daily.ahead(600.0) == pytest.approx(100.0)


def test_a_day_beside_which_today_is_very_different_is_followed_so_far_only() -> None:
    minutes = int(DAY_S / 60)
    daily = fed(Daily(), [1.0] * minutes + [100.0] * 20, 60.0)
    assert daily.ahead(60.0) == pytest.approx(3.0)


@given(st.lists(st.sampled_from([0.0, 1.0, 1e6]), max_size=30))
def test_no_predictor_foresees_less_than_nothing(values: list[float]) -> None:
    for predictor in predictors():
        ahead = fed(predictor, values).ahead(60.0)
        assert ahead is None or 0.0 <= ahead < math.inf


# -- what they are wrong by ---------------------------------------------------------------------------


def test_nothing_is_said_by_who_says_nothing() -> None:
    assert corrected(Told(lambda _: None), [10.0] * 50).ahead is None


def test_before_anything_came_of_them_forecasts_are_as_they_were_made() -> None:
    assert corrected(Told(lambda value: 3 * value), [10.0] * 12).ahead == pytest.approx(30.0)


@pytest.mark.parametrize("by", [3.0, 1.0, 1 / 3])
def test_who_is_always_wrong_by_the_same_is_right_after_it_was_learned(by: float) -> None:
    assert corrected(Told(lambda value: by * value), [10.0] * 100).ahead == pytest.approx(10.0)


def test_nothing_is_corrected_without_bound() -> None:
    assert corrected(Told(lambda v: v / 100), [10.0] * 100).ahead == pytest.approx(0.8)
    assert corrected(Told(lambda v: v * 100), [10.0] * 100).ahead == pytest.approx(125.0)


def test_noise_is_no_reason_to_foresee_less_or_more() -> None:
    noise = np.random.default_rng(1)
    values = [float(value) for value in noise.poisson(2.0, 3000)]
    found = corrected(Steady("s", 300.0), values)
    plain = fed(Steady("s", 300.0), values).ahead(60.0)
    assert found.ahead == pytest.approx(plain, rel=0.15)


def test_who_goes_wrong_later_is_corrected_within_some_hours() -> None:
    values = [10.0] * 400
    made = iter([1.0] * 400 + [3.0] * 2000)
    found = corrected(Told(lambda value: next(made) * value), values)
    assert found.ahead == pytest.approx(10.0)
    for _ in range(1500):
        found.take(10.0, STEP_S, HORIZON_S)
    assert found.ahead == pytest.approx(10.0, rel=0.05)


@given(st.lists(st.sampled_from([0.0, 1.0, 1e6]), max_size=60))
def test_no_correction_makes_less_than_nothing_of_a_forecast(values: list[float]) -> None:
    for predictor in predictors():
        ahead = corrected(predictor, values).ahead
        assert ahead is None or 0.0 <= ahead < math.inf
