"""Scale-down is delayed, and longer where earlier ones were reverted soon."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.planner.stabilize import CALM, DesiredWindow, Regrets

OVER_S = 60.0


class Pool:
    """One that has what its window gives it, a wish every ten seconds."""

    def __init__(self, have: int = 20, *, calm: bool = False, over_s: float = OVER_S) -> None:
        self.window, self.calm, self.over_s = DesiredWindow(), calm, over_s
        self.have, self.now = have, 0.0

    def look(self, wanted: float, *, pressing: bool = False) -> int:
        self.now += 10.0
        (held,) = self.window.hold(
            np.array([wanted], float),
            np.array([float(self.have)]),
            self.now,
            over_s=self.over_s,
            pressing=np.array([pressing]),
            calm=np.array([self.calm]),
        )
        self.have = int(held)
        return self.have

    def desired(self, wanted: float, looks: int = 1) -> int:
        for _ in range(looks):
            self.look(wanted)
        return self.have


def test_what_is_wanted_on_top_is_there_at_once() -> None:
    assert Pool().desired(27) == 27


def test_fewer_must_be_wanted_for_half_of_the_window() -> None:
    pool = Pool()
    pool.desired(20, 10)
    assert pool.desired(12, 3) == 20
    assert pool.desired(12) == 12


def test_it_goes_down_to_the_median_of_what_was_wanted_within_the_window() -> None:
    pool = Pool()
    pool.desired(20, 10)
    for wanted in (5, 14, 6, 15):
        held = pool.desired(wanted)
    # 20, 20, 20, 15, 14, 6, 5
    assert held == 15


def test_never_below_what_is_wanted_and_never_up_without_a_wish() -> None:
    pool = Pool()
    pool.desired(4, 10)
    assert pool.have == 4
    assert pool.desired(9) == 9
    assert pool.desired(8, 2) >= 8


def test_a_calm_pool_goes_down_to_the_most_that_was_wanted_within_a_longer_window() -> None:
    pool = Pool(calm=True)
    pool.desired(20, 10)
    looks = int(CALM * OVER_S / 10)
    assert pool.desired(5, looks) == 20
    assert pool.desired(5) == 5


def test_a_wish_near_to_what_there_is_is_left_alone_while_nothing_waits() -> None:
    pool = Pool(20)
    assert pool.desired(22, 20) == 20
    assert pool.desired(18, 20) == 20
    assert pool.look(22, pressing=True) == 22
    assert pool.desired(25) == 25


def test_a_small_part_of_a_replica_starts_none_also_in_a_small_pool() -> None:
    pool = Pool(4)
    assert pool.desired(4.4, 20) == 4
    assert pool.look(4.4, pressing=True) == 5
    assert pool.desired(5.6) == 6


def test_what_was_there_before_anything_was_wanted_had_its_reasons() -> None:
    pool = Pool(10)
    assert pool.desired(2, 3) == 10
    assert pool.desired(2) == 2


def test_without_a_window_what_is_not_wanted_goes_at_once() -> None:
    pool = Pool(over_s=0.0)
    pool.desired(20, 10)
    assert pool.desired(4) == 4


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.booleans(), st.sampled_from([5.0, 10.0, 40.0])),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
def test_what_is_held_lies_between_what_is_wanted_and_what_there_is(
    desired_sizes: list[tuple[int, bool, float]], calm: bool
) -> None:
    window, have, now = DesiredWindow(), 10, 0.0
    for wanted, pressing, seconds in desired_sizes:
        now += seconds
        (held,) = window.hold(
            np.array([wanted], float), np.array([float(have)]), now, over_s=OVER_S,
            pressing=np.array([pressing]), calm=np.array([calm]),
        )  # fmt: skip
        assert min(wanted, have) <= held <= max(wanted, have)
        assert not (pressing and held < wanted)
        have = int(held)


def test_fleets_side_by_side_are_held_as_each_would_be_alone() -> None:
    rng = np.random.default_rng(1)
    many, alone = DesiredWindow(), [DesiredWindow() for _ in range(4)]
    calm = np.array([False, True, False, True])
    have = np.array([10.0, 10.0, 3.0, 3.0])
    for look in range(60):
        wanted = rng.integers(1, 20, 4).astype(float)
        pressing = rng.random(4) < 0.2
        now = 10.0 * look
        held = many.hold(wanted, have, now, over_s=OVER_S, pressing=pressing, calm=calm)
        for i, window in enumerate(alone):
            (one,) = window.hold(
                wanted[i : i + 1], have[i : i + 1], now, over_s=OVER_S,
                pressing=pressing[i : i + 1], calm=calm[i : i + 1],
            )  # fmt: skip
            assert one == held[i]
        have = held


# -- regrets -----------------------------------------------------------------------------------------


def regretted(times: int, *, after_s: float = 30.0, back: int = 8, every_s: float = 600.0) -> bool:
    """Down to four, and so many wanted again so long after, so often."""
    regrets, now, found = Regrets(), 0.0, False
    for _ in range(times):
        regrets.released(4, now)
        found = regrets.take(back, now + after_s, OVER_S)
        now += every_s
    return found


def test_two_regrets_an_hour_are_bad_luck_and_a_third_is_not() -> None:
    assert [regretted(times) for times in (1, 2, 3, 4)] == [False, False, True, True]


@pytest.mark.parametrize(
    "case",
    [{"back": 6}, {"after_s": 2 * OVER_S}, {"every_s": 1900.0}],
    ids=["few are the noise of a load", "late is not too soon", "seldom is no flapping"],
)
def test_what_is_no_regret_does_not_count(case: dict[str, float]) -> None:
    assert not regretted(6, **case)  # type: ignore[arg-type]  # back is a whole number


def test_one_release_is_regretted_once() -> None:
    regrets = Regrets()
    regrets.released(4, 0.0)
    assert not any(regrets.take(wanted, 10.0 * wanted, 10 * OVER_S) for wanted in range(8, 20))


def test_after_an_hour_it_is_forgotten() -> None:
    regrets = Regrets()
    for at in (0.0, 100.0, 200.0):
        regrets.released(4, at)
        regrets.take(9, at + 10.0, OVER_S)
    assert regrets.take(5, 1000.0, OVER_S)
    assert not regrets.take(5, 3700.0, OVER_S)
