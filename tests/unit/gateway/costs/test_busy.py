"""Busy time is the union of the times of requests."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.gateway.costs import busy
from kvasir_platform.gateway.costs.busy import BusyTime

spans = st.lists(st.tuples(st.integers(-10, 110), st.integers(-10, 110)).map(sorted), max_size=40)


@given(spans)
def test_it_is_the_length_of_the_union_in_any_order(each: list[list[int]]) -> None:
    made = BusyTime(0.0, 100.0)
    for begin, end in each:
        made.add(begin, end)
    covered = {at for begin, end in each for at in range(max(begin, 0), min(end, 100))}
    assert math.isclose(made.seconds, len(covered), abs_tol=1e-9)


def test_it_stays_small_and_exact_for_requests_that_end_one_after_the_other() -> None:
    made = BusyTime(0.0, 1e6)
    for at in range(0, 100_000, 10):
        made.add(at, at + 1.0)
    assert made.seconds == 10_000
    assert len(made._begins) <= busy.MOST_SPANS
