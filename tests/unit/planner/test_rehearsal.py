"""The choice of forecast and reserve, from the results of simulated fleets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.planner.backtest import MARGINS, Backtest, ForecastChoice, LoadSample, SloLedger

STEP_S, START_S, SLACK_S = 15.0, 120.0, 10.0
HOUR = int(3600 / STEP_S)
AIM = 0.005
Predicted = Callable[[Sequence[float]], Sequence[float]]


def as_is(past: Sequence[float]) -> list[float]:
    return [past[-1]]


def averaged(past: Sequence[float]) -> list[float]:
    return [float(np.mean(past[-20:]))]


def played(
    loads: Sequence[float],
    predicted: Predicted = as_is,
    ledger: SloLedger | None = None,
    per_load: float = 10.0,
) -> Backtest:
    """What has seen these loads, in replicas, of which each stands for so many requests a second."""
    found = Backtest(len(predicted([1.0])), SloLedger(AIM) if ledger is None else ledger, 1.0)
    for look in range(len(loads)):
        load = loads[look]
        found.take(
            LoadSample(
                seconds=STEP_S,
                load=load,
                predicted=predicted(loads[: look + 1]),
                requests=per_load * load * STEP_S,
                spare=0.3,
                start_s=START_S,
                slack_s=SLACK_S,
                over_s=2 * START_S,
            ),
            STEP_S * (look + 1),
        )
    return found


def crowds(hours: int, times: float = 2.0) -> list[float]:
    """Once an hour, for ten minutes, all at once."""
    return [20.0 * (times if look % HOUR >= HOUR - 40 else 1.0) for look in range(hours * HOUR)]


def test_before_anything_came_the_simplest_is_raised_by_a_safe_margin() -> None:
    assert played([]).choose() == ForecastChoice(0, 1.6, False)
    assert played([0.0] * HOUR).choose() == ForecastChoice(0, 1.6, False)


def test_the_less_is_kept_beyond_a_calm_load_the_longer_it_has_sufficed() -> None:
    margins = [played([20.0] * (hours * HOUR)).choose().margin for hours in (1, 3, 12)]
    assert margins == sorted(margins, reverse=True)
    assert margins[0] >= 1.35
    assert margins[-1] <= 1.0


def test_more_is_kept_where_crowds_come_all_at_once() -> None:
    assert played(crowds(12)).choose().margin >= 1.3
    assert played(crowds(12, times=1.05)).choose().margin <= 1.1


def test_what_was_learned_of_crowds_is_not_forgotten_within_some_quiet_hours() -> None:
    quiet = crowds(6) + [20.0] * (6 * HOUR)
    assert played(quiet).choose().margin > played([20.0] * (12 * HOUR)).choose().margin


@pytest.mark.parametrize("wrong", [3.0, 1 / 3], ids=["too much", "too little"])
def test_who_foresees_well_is_followed_and_not_who_foresees_wrongly(wrong: float) -> None:
    rng = np.random.default_rng(1)
    loads = [float(value) for value in 20.0 + rng.normal(0.0, 1.0, 6 * HOUR)]
    for place in (0, 1):

        def both(past: Sequence[float], place: int = place) -> list[float]:
            return [averaged(past)[0] * (1.0 if i == place else wrong) for i in (0, 1)]

        assert played(loads, both).choose().predictor == place


def test_where_replicas_that_went_are_wanted_back_again_and_again_they_are_kept() -> None:
    # Shorter than a start and what makes up for it.
    flapping = [30.0 if look // 16 % 2 else 10.0 for look in range(8 * HOUR)]
    assert played(flapping).choose().calm
    assert not played([20.0 + 10 * math.sin(look / HOUR) for look in range(8 * HOUR)]).choose().calm


def test_what_was_truly_missed_is_taken_from_what_may_be() -> None:
    loads = [20.0] * (6 * HOUR)
    well, badly = SloLedger(AIM), SloLedger(AIM)
    for ledger, missed in ((well, 0), (badly, 20_000)):
        for _ in range(6):
            ledger.take(700_000, missed, 3600.0)
    assert badly.overdrawn > well.overdrawn == 0.0
    assert played(loads, ledger=badly).choose().margin > played(loads, ledger=well).choose().margin


def test_where_no_fleet_keeps_the_promise_the_one_that_comes_nearest_is_followed() -> None:
    # Ten times as much for two minutes, which is over before a replica has started.
    hopeless = [200.0 if look % 80 < 8 else 20.0 for look in range(4 * HOUR)]
    assert played(hopeless).choose().margin == max(MARGINS)


def test_a_ledger_forgets_within_days_and_never_gives_credit() -> None:
    ledger = SloLedger(0.01)
    ledger.take(1000, 0, 10.0)
    assert ledger.overdrawn == 0.0
    ledger.take(1000, 100, 10.0)
    assert ledger.overdrawn == pytest.approx(80.0, rel=0.01)
    ledger.take(0, 0, 3 * 86_400.0)
    assert ledger.overdrawn == pytest.approx(80.0 * math.exp(-3), rel=0.01)


@given(
    st.lists(st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e6]), max_size=40),
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1)), max_size=5),
)
def test_whatever_comes_something_sensible_is_chosen(
    loads: list[float], news: list[tuple[int, float]]
) -> None:
    ledger = SloLedger(AIM)
    for judged, part in news:
        ledger.take(judged, int(part * judged), STEP_S)
    choice = played(loads, ledger=ledger).choose()
    assert choice.predictor == 0
    assert choice.margin in MARGINS
