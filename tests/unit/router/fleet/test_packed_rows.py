"""What is read of a packed row is what was added, and the newest rows are kept."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ports.views.packed import PackedRows

NAMES = st.text(st.characters(codec="utf-8"), max_size=3)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8")),
    st.binary(),
)
ROWS = st.tuples(NAMES, st.lists(VALUES, max_size=3), st.binary(max_size=2), st.floats(allow_nan=False))


@given(st.integers(0, 5), st.lists(st.lists(ROWS, max_size=7), max_size=5))
def test_the_newest_rows_are_those_of_a_list(capacity: int, batches: list[list[Any]]) -> None:
    kept = PackedRows(capacity, columns=1)
    for batch in batches:
        names, values, shared, figures = ([row[at] for row in batch] for at in range(4))
        kept.add(names, values, shared=shared, figures=np.array([figures], np.float64))
    every = [row for batch in batches for row in batch]
    newest = every[max(0, len(every) - capacity) :]
    assert len(kept) == len(newest)
    assert [msgspec.msgpack.decode(kept.value(row)) for row in range(len(kept))] == [row[1] for row in newest]
    assert [kept.shared(row) for row in range(len(kept))] == [row[2] for row in newest]
    assert kept.column(lambda figures: figures(0)).tolist() == [row[3] for row in newest]
    latest = {row[0]: number for number, row in enumerate(newest)}
    assert {row[0]: kept.find(row[0]) for row in every} == {row[0]: latest.get(row[0]) for row in every}


def test_a_row_may_be_large_and_have_numbers_of_numpy() -> None:
    kept = PackedRows(2)
    large = [list(range(10_000)), "ß" * 100_000]
    kept.add(["large", "numpy"], [large, [np.int64(-3), np.float64(0.5), np.bool_(True)]])
    assert msgspec.msgpack.decode(kept.value(0)) == large
    assert msgspec.msgpack.decode(kept.value(1)) == [-3, 0.5, True]
    assert kept.shared(0) == b""


@pytest.mark.parametrize("name", ["", "other"])
def test_a_name_that_no_row_has_is_not_found(name: str) -> None:
    kept = PackedRows(2)
    assert kept.find(name) is None
    kept.add(["one"], [1])
    assert kept.find(name) is None


def test_kept_rows_are_not_visited_by_the_garbage_collector() -> None:
    kept = PackedRows(1000, columns=1)
    before = len(gc.get_objects())
    for number in range(100):
        kept.add(
            [f"{number}"] * 10, [[number, "text", None]] * 10, shared=[b"x"] * 10, figures=np.zeros((1, 10))
        )
    assert len(gc.get_objects()) - before < 10
