"""The cost of restarts, and who is charged."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from kvasir_router.requests.restarts import DEPTH, RetryBudget


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.integers(0, 10), st.lists(st.booleans(), max_size=400))
def test_no_more_starts_than_a_fraction_of_arrivals_and_the_reserve(
    ratio: float, reserve: int, asks: list[bool]
) -> None:
    budget = RetryBudget(ratio, reserve)
    arrivals = granted = 0
    for ask in asks:
        if ask:
            granted += budget.withdraw()
        else:
            budget.deposit()
            arrivals += 1
        assert granted <= ratio * arrivals + reserve + 1e-6


def test_what_arrives_pays_for_new_starts() -> None:
    budget = RetryBudget(0.25, reserve=0)
    for _ in range(40):
        budget.deposit()
    assert [budget.withdraw() for _ in range(12)] == [True] * 10 + [False] * 2


def test_a_router_that_has_seen_nothing_may_still_retry_a_little() -> None:
    budget = RetryBudget(0.15)
    assert [budget.withdraw() for _ in range(12)] == [True] * 10 + [False] * 2


def test_a_long_good_time_does_not_pay_for_a_storm() -> None:
    budget = RetryBudget(1.0)
    for _ in range(10_000):
        budget.deposit()
    assert sum(budget.withdraw() for _ in range(10_000)) == DEPTH


def test_a_ratio_of_nothing_leaves_only_the_reserve() -> None:
    budget = RetryBudget(0.0, reserve=1)
    for _ in range(100):
        budget.deposit()
    assert [budget.withdraw(), budget.withdraw()] == [True, False]
