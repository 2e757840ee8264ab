"""Neighbouring blocks become one descriptor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_workers.transfer.runs import Run, merge


def test_blocks_that_are_neighbours_on_both_sides_become_one_run() -> None:
    assert merge([4, 5, 6, 9], [10, 11, 12, 13], 100) == [Run(4, 10, 3), Run(9, 13, 1)]


def test_blocks_that_are_neighbours_on_one_side_only_stay_apart() -> None:
    assert merge([4, 5], [11, 10], 100) == [Run(4, 11, 1), Run(5, 10, 1)]


def test_a_run_ends_where_it_is_long_enough() -> None:
    assert merge(range(5), range(5), 2) == [Run(0, 0, 2), Run(2, 2, 2), Run(4, 4, 1)]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        merge([1], [1, 2], 10)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.integers(1, 5))
def test_runs_hold_the_same_pairs_in_the_same_order(pairs: list[tuple[int, int]], longest: int) -> None:
    runs = merge([s for s, _ in pairs], [t for _, t in pairs], longest)
    assert [(r.source + i, r.target + i) for r in runs for i in range(r.blocks)] == pairs
    assert all(run.blocks <= longest for run in runs)
