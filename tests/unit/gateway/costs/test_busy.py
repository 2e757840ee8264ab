"""Busy time is the union of the times of requests."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.gateway.costs import busy
from kvasir_platform.gateway.costs.busy import BusyTime, joined_spans

spans = st.lists(st.tuples(st.integers(-10, 110), st.integers(-10, 110)).map(sorted), max_size=40)


@given(spans)
def test_it_is_the_length_of_the_union_in_any_order(each: list[list[int]]) -> None:
    made = BusyTime(0.0, 100.0)
    for begin, end in each:
        made.add(begin, end)
    covered = {at for begin, end in each for at in range(max(begin, 0), min(end, 100))}
    assert math.isclose(made.seconds, len(covered), abs_tol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 2), spans), max_size=4))
def test_spans_of_several_workers_that_overlap_are_joined_for_each_of_them(
    found: list[tuple[int, list[list[int]]]],
) -> None:
    flat = [(worker, begin, end) for worker, each in found for begin, end in each]
    workers, begins, ends = (np.array([row[at] for row in flat]) for at in range(3))
    joined = list(joined_spans(workers.astype(np.intp), begins + 1.8e9, ends + 1.8e9))
    assert len(set(joined)) == len(joined)
    for worker in range(3):
        apart, together = BusyTime(0.0, 2e9), BusyTime(0.0, 2e9)
        for of, begin, end in flat:
            if of == worker:
                apart.add(begin + 1.8e9, end + 1.8e9)
        mine = [(first, last) for of, first, last in joined if of == worker]
        for first, last in mine:
            together.add(first, last)
        assert math.isclose(apart.seconds, together.seconds, abs_tol=1e-4)
        assert all(before < after for (_, before), (after, _) in pairwise(mine))


def test_it_stays_small_and_exact_for_requests_that_end_one_after_the_other() -> None:
    made = BusyTime(0.0, 1e6)
    for at in range(0, 100_000, 10):
        made.add(at, at + 1.0)
    assert made.seconds == 10_000
    assert len(made._begins) <= busy.MOST_SPANS
