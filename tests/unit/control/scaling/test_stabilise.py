"""A pool does not breathe with its load: down late, and later where releases are regretted often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.control.scaling.stabilise import Window

LEAST_S = 30.0


class Pool:
    """One that has what its window gives it, a wish every ten seconds."""

    def __init__(self, have: int = 10) -> None:
        self.window = Window(LEAST_S)
        self.have, self.now = have, 0.0

    def wish(self, wanted: int, seconds: float = 10.0) -> int:
        end = self.now + seconds
        while self.now < end:
            self.now += 10.0
            held = self.window.hold(wanted, self.have, self.now)
            if held < self.have:
                self.window.released(held, self.now)
            self.have = held
        return self.have

    def regret(self) -> None:
        """Let some go, and want them back at once."""
        self.wish(6, self.window.seconds + 20.0)
        assert self.have == 6
        self.wish(10)


def test_what_is_wanted_on_top_is_there_at_once() -> None:
    assert Pool().wish(17) == 17


def test_fewer_must_be_wanted_for_the_whole_window() -> None:
    pool = Pool()
    pool.wish(10)
    assert pool.wish(6, LEAST_S) == 10
    assert pool.wish(6) == 6


def test_it_goes_down_to_the_most_that_was_wanted_within_the_window() -> None:
    pool = Pool()
    pool.wish(10)
    pool.wish(6, LEAST_S - 10.0)
    assert pool.wish(8) == 10
    assert pool.wish(5, LEAST_S) == 8
    assert pool.wish(5) == 5


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([5.0, 10.0, 40.0])), max_size=40))
def test_never_fewer_than_the_most_wanted_within_the_window_and_never_more_than_there_is_reason_for(
    wishes: list[tuple[int, float]],
) -> None:
    window, have, now = Window(LEAST_S), 3, 0.0
    past: list[tuple[float, int]] = []
    for wanted, seconds in wishes:
        now += seconds
        past.append((now, wanted))
        held = window.hold(wanted, have, now)
        # As of before a regret within this very look: windows only grow by it.
        within = [most for at, most in past if at >= now - LEAST_S]
        assert held >= wanted
        assert held >= min(have, max(within))
        assert held <= max(have, wanted)
        assert LEAST_S <= window.seconds <= 16 * LEAST_S
        if held < have:
            assert all(most <= held for at, most in past if at >= now - window.seconds)
            window.released(held, now)
        have = held


def test_two_regrets_an_hour_are_bad_luck_and_each_further_one_doubles_the_window_up_to_a_bound() -> None:
    pool, seconds = Pool(), []
    for _ in range(8):
        pool.regret()
        seconds.append(pool.window.seconds)
    assert seconds == [30.0, 30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0]


def test_one_release_is_regretted_once_also_where_they_are_wanted_back_one_by_one() -> None:
    pool = Pool()
    for _ in range(3):
        pool.wish(6, pool.window.seconds + 20.0)
        for wanted in range(7, 12):
            pool.wish(wanted)
    assert pool.window.seconds == 2 * LEAST_S


def test_the_noise_of_a_load_is_no_regret() -> None:
    pool = Pool(20)
    for _ in range(10):
        pool.wish(17, pool.window.seconds + 20.0)
        pool.wish(20)
    assert pool.window.seconds == LEAST_S


def test_what_is_wanted_back_late_was_not_let_go_too_early() -> None:
    pool = Pool()
    for _ in range(4):
        pool.wish(6, 50.0)
        pool.wish(6, 10 * LEAST_S)
        pool.wish(10)
    assert pool.window.seconds == LEAST_S


def test_after_an_hour_without_regrets_the_window_is_what_it_is_at_rest() -> None:
    pool = Pool()
    for _ in range(4):
        pool.regret()
    assert pool.window.seconds == 4 * LEAST_S
    pool.wish(10, 3600.0)
    assert pool.window.seconds == LEAST_S


def test_without_a_window_what_is_not_wanted_goes_at_once() -> None:
    window = Window(0.0)
    assert window.hold(10, 10, 0.0) == 10
    assert window.hold(2, 10, 10.0) == 2
