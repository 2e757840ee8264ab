"""What is foreseen, how often it suffices, and how careful that makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_platform.control.scaling.caution import Caution
from kvasir_platform.control.scaling.forecast import (
    DAY_S,
    Daily,
    Forecast,
    Forecaster,
    Predictor,
    Steady,
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


def forecaster(*made: Predictor, values: Sequence[float] = ()) -> Forecaster:
    found = Forecaster(made, interval_s=STEP_S, smooth_s=STEP_S)
    for number, value in enumerate(values, start=1):
        found.take(value, STEP_S, number * STEP_S, HORIZON_S)
    return found


# -- predictors --------------------------------------------------------------------------------------


def test_steady_foresees_what_has_been_on_average() -> None:
    assert Steady("s", 60.0).ahead(60.0) is None
    steady = fed(Steady("s", 60.0), [5.0] * 3)
    assert steady.ahead(1e9) == pytest.approx(5.0)
    assert fed(steady, [11.0] * 6).ahead(60.0) == pytest.approx(5.0 + 6.0 * (1 - math.exp(-1)))


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


# -- what is made of them ----------------------------------------------------------------------------


def test_before_anything_was_said_it_is_nothing() -> None:
    assert forecaster(*predictors()).forecast(0.99) == Forecast(0.0, 0.0, 0.0, "nothing")


def test_before_anything_was_learned_a_forecast_is_raised_by_a_usual_part() -> None:
    found = forecaster(Told(lambda value: value), values=[10.0] * 3).forecast(0.99)
    assert (found.now, found.expected) == (10.0, 10.0)
    assert found.upper == pytest.approx(13.0)


@pytest.mark.parametrize("by", [3.0, 1.0, 1 / 3])
def test_who_is_always_wrong_by_the_same_is_right_after_it_was_learned(by: float) -> None:
    found = forecaster(Told(lambda value: by * value), values=[10.0] * 100).forecast(0.99)
    assert found.expected == pytest.approx(10.0 * by)
    assert found.upper == pytest.approx(10.0)


def test_nothing_is_corrected_without_bound() -> None:
    assert forecaster(Told(lambda v: v / 100), values=[10.0] * 100).forecast(0.99).upper == pytest.approx(0.8)
    assert forecaster(Told(lambda v: v * 100), values=[10.0] * 100).forecast(0.99).upper == pytest.approx(250)


def test_the_one_is_believed_who_would_have_cost_the_least() -> None:
    values = [10.0 + 5 * math.sin(number / 10) for number in range(400)]
    noise = np.random.default_rng(1)
    wild = Told(lambda value: value * float(noise.uniform(0.3, 3.0)), "wild")
    calm = Told(lambda value: value, "calm")
    assert forecaster(wild, calm, values=values).forecast(0.95).predictor == "calm"
    assert forecaster(calm, wild, values=values).forecast(0.95).predictor == "calm"


def test_who_says_nothing_is_not_asked() -> None:
    found = forecaster(Told(lambda value: None, "mute"), Told(lambda value: value), values=[10.0] * 50)
    assert found.forecast(0.99).predictor == "told"


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.sampled_from([0.5, 0.9]))
def test_a_forecast_suffices_about_as_often_as_it_was_asked_to(seed: int, level: float) -> None:
    rng = np.random.default_rng(seed)
    values = [float(value) for value in rng.lognormal(2.0, 0.3, 600)]
    found = Forecaster([Steady("s", 300.0)], interval_s=STEP_S, smooth_s=STEP_S)
    open_: list[tuple[int, float]] = []
    kept = []
    for number, value in enumerate(values):
        found.take(value, STEP_S, number * STEP_S, HORIZON_S)
        if number >= 200:
            open_.append((number, found.forecast(level).upper))
        if open_ and open_[0][0] + 6 <= number:
            at, upper = open_.pop(0)
            kept.append(max(values[at + 1 : at + 7]) <= upper)
    assert np.mean(kept) == pytest.approx(level, abs=0.2)


def test_what_lasts_shorter_than_can_be_waited_out_is_not_sized_for() -> None:
    def upper(smooth_s: float) -> float:
        found = Forecaster([Steady("s", 300.0)], interval_s=STEP_S, smooth_s=smooth_s)
        for number in range(200):
            found.take(50.0 if number % 6 == 0 else 2.0, STEP_S, number * STEP_S, HORIZON_S)
        return found.forecast(0.99).upper

    assert upper(60.0) == pytest.approx(10.0, rel=0.15)
    assert upper(10.0) == pytest.approx(50.0, rel=0.15)


def test_a_load_that_ended_is_foreseen_to_be_nothing_in_the_end() -> None:
    found = forecaster(*predictors(), values=[10.0] * 100 + [0.0] * 1000).forecast(0.99)
    assert found.now == 0.0
    assert found.upper < 0.1


# -- caution -----------------------------------------------------------------------------------------


def learned(missed: int, times: int, caution: Caution | None = None, judged: int = 100) -> Caution:
    found = Caution(0.003) if caution is None else caution
    for _ in range(times):
        found.learn(judged, missed, 10.0)
    return found


def test_before_anything_is_known_nearly_all_cases_are_to_be_covered() -> None:
    assert Caution(0.003).level == pytest.approx(0.99, abs=0.002)


def test_what_is_missed_raises_the_level_and_what_may_be_missed_and_is_not_lowers_it() -> None:
    begin = Caution(0.003).level
    assert learned(20, 5).level > begin
    assert learned(0, 50).level < begin


def test_where_as_much_is_missed_as_was_aimed_at_the_level_stays() -> None:
    caution = Caution(0.1)
    before = caution.level
    learned(10, 50, caution)
    assert caution.level == pytest.approx(before)


def test_nothing_is_learned_while_nothing_ends() -> None:
    before = Caution(0.003).level
    assert learned(0, 100, judged=0).level == before


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.floats(0, 1), st.sampled_from([1.0, 10.0, 300.0])), max_size=50
    )
)
def test_the_level_is_always_between_some_caution_and_nearly_all(
    news: list[tuple[int, float, float]],
) -> None:
    caution = Caution(0.003)
    for judged, part, seconds in news:
        caution.learn(judged, int(part * judged), seconds)
        assert 0.01 < caution.level < 0.9992
