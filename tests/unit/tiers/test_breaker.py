"""A failed tier is not used, and is probed rarely, by one call at a time."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvasir_workers.tiers.breaker import Breaker, BreakerLimits

LIMITS = BreakerLimits(failures=3, backoff_s=1.0, backoff_max_s=8.0, jitter=0.5)


class NoJitter(Random):
    def random(self) -> float:
        return 0.0


def breaker() -> Breaker:
    return Breaker(NoJitter(), LIMITS)


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    it = breaker()
    assert [it.failed(0.0), it.failed(0.0)] == [False, False]
    it.succeeded(0.0)
    assert [it.failed(0.0), it.failed(0.0), it.closed] == [False, False, True]
    assert it.failed(0.0)
    assert not it.closed


def test_one_deadline_that_passed_is_enough() -> None:
    it = breaker()
    assert it.failed(0.0, at_once=True)
    assert not it.closed


def test_one_trial_is_due_after_the_pause_and_its_success_closes() -> None:
    it = breaker()
    it.failed(10.0, at_once=True)
    assert not it.due(10.99)
    assert it.due(11.0)
    assert not it.due(11.0)
    assert not it.closed
    assert it.succeeded(11.1)
    assert it.closed
    assert not it.due(99.0)


def test_a_trial_that_never_ends_makes_room_for_another() -> None:
    it = breaker()
    it.failed(0.0, at_once=True)
    assert it.due(1.0)
    assert not it.due(1.9)
    assert it.due(2.0)


def pauses(it: Breaker, now: float, trials: int) -> list[float]:
    """How long it waits before each of some failing trials."""
    found = []
    for _ in range(trials):
        began = now
        while not it.due(now):
            now += 0.125
        found.append(now - began)
        it.failed(now)
    return found


def test_the_pause_doubles_up_to_its_bound() -> None:
    it = breaker()
    it.failed(0.0, at_once=True)
    assert pauses(it, 0.0, 6) == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_what_fails_soon_after_a_trial_went_well_waits_longer_and_after_good_work_no_more() -> None:
    it = breaker()
    it.failed(0.0, at_once=True)
    assert it.due(1.0)
    it.succeeded(1.0)
    it.failed(1.5, at_once=True)
    assert not it.due(3.4)
    assert it.due(3.5)
    it.succeeded(3.5)
    it.failed(100.0, at_once=True)
    assert it.due(101.0)


def test_failures_of_calls_that_were_under_way_do_not_lengthen_the_pause() -> None:
    it = breaker()
    it.failed(0.0, at_once=True)
    assert not any([it.failed(0.1), it.failed(0.2, at_once=True)])
    assert it.due(1.0)


def test_jitter_spreads_trials_and_never_shortens_a_pause() -> None:
    def first(seed: int) -> float:
        it = Breaker(Random(seed), LIMITS)
        it.failed(0.0, at_once=True)
        return next(step / 100 for step in range(1000) if it.due(step / 100))

    found = [first(seed) for seed in range(50)]
    assert all(1.0 <= at <= 1.51 for at in found)
    assert len(set(found)) > 10


@given(st.lists(st.tuples(st.sampled_from(["fail", "late", "well", "due"]), st.floats(0, 20))))
def test_whatever_happens_trials_are_apart_and_a_trial_is_always_due_in_the_end(
    steps: list[tuple[str, float]],
) -> None:
    it, now, trials = Breaker(Random(1), LIMITS), 0.0, list[float]()
    for what, seconds in steps:
        now += seconds
        before = it.closed
        if what == "due":
            if it.due(now):
                assert not before
                trials.append(now)
            assert it.closed == before
        elif what == "well":
            assert it.succeeded(now) == (not before)
            trials.clear()
            assert it.closed
        else:
            opened = it.failed(now, at_once=what == "late")
            assert opened == (before and not it.closed)
            assert not it.closed or before
    assert all(later - earlier >= LIMITS.backoff_s for earlier, later in pairwise(trials))
    assert it.closed or it.due(now + LIMITS.backoff_max_s * (1 + LIMITS.jitter))
