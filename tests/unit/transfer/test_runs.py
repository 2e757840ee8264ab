"""Adjacent blocks become one descriptor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_workers.transfer.nixl.runs import merge


def runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """Source, target and length of each run."""
    found = merge(source, target)
    return list(zip(found.source.tolist(), found.target.tolist(), found.blocks.tolist(), strict=True))


def test_blocks_that_are_neighbours_on_both_sides_become_one_run() -> None:
    assert runs([4, 5, 6, 9], [10, 11, 12, 13]) == [(4, 10, 3), (9, 13, 1)]


def test_blocks_that_are_neighbours_on_one_side_only_stay_apart() -> None:
    assert runs([4, 5], [11, 10]) == [(4, 11, 1), (5, 10, 1)]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="1 source blocks for 2"):
        merge([1], [1, 2])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_runs_hold_the_same_pairs_in_the_same_order_and_are_as_long_as_can_be(
    pairs: list[tuple[int, int]],
) -> None:
    found = runs([s for s, _ in pairs], [t for _, t in pairs])
    assert [(of + i, to + i) for of, to, blocks in found for i in range(blocks)] == pairs
    for (of, to, blocks), following in itertools.pairwise(found):
        assert following[:2] != (of + blocks, to + blocks)
