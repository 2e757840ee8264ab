"""Disjoint spans stay disjoint and sorted, whatever the order of insertion."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.gateway.filters.spans import Spans

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda each: (each[0], sum(each))))


def kept(spans: list[tuple[int, int]]) -> tuple[Spans, set[int]]:
    made = Spans()
    for begin, end in spans:
        made.add(begin, end)
    return made, {at for begin, end in spans for at in range(begin, end)}


@given(SPANS, st.integers(0, 50), st.integers(1, 10))
def test_they_meet_what_they_have_a_position_of(
    spans: list[tuple[int, int]], begin: int, length: int
) -> None:
    made, positions = kept(spans)
    assert made.meet(begin, begin + length) is any(begin <= at < begin + length for at in positions)


@given(SPANS, st.integers(0, 50))
def test_those_that_begin_early_enough_are_taken_in_order_and_apart(
    spans: list[tuple[int, int]], upto: int
) -> None:
    made, positions = kept(spans)
    first, rest = made.take(upto), made.take(100)
    taken = [*first, *rest]
    assert [at for begin, end in taken for at in range(begin, end)] == sorted(positions)
    assert all(end < begin for (_, end), (begin, _) in pairwise(taken))
    assert all(begin <= upto for begin, _ in first)
    assert all(begin > upto for begin, _ in rest)


@given(SPANS, st.integers(0, 50))
def test_those_that_end_early_enough_are_forgotten(spans: list[tuple[int, int]], upto: int) -> None:
    made, positions = kept(spans)
    made.forget(upto)
    left = {at for begin, end in made.take(100) for at in range(begin, end)}
    assert {at for at in positions if at >= upto} <= left <= positions
    assert not left or max(left) >= upto
