"""The costs of places: the native code and its Python twin agree to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from kvasir import native
from kvasir.native import _twin_costs as twin
from kvasir.ports.routing import LOWER_TIERS, RateColumns

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="there is nothing to compare with the twin")

TERMS = 14
COUNTS = st.sampled_from([0, 1, 3, 17, 2048, 100_000])
SECONDS = st.sampled_from([0.0, 1e-10, 3e-5, 0.0007, 0.013, 0.5])
WEIGHTS = st.tuples(*[st.sampled_from([0.0, 0.3, 1.0, 1.7])] * 5, st.sampled_from([1 / 2048, 0.1]))
REQUESTS = st.tuples(COUNTS, COUNTS, st.integers(1, 3), SECONDS)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Any, ...]:
    """Counts, bytes of a token, and rates of up to nine places."""
    places = draw(st.integers(1, 9))

    def column(items: st.SearchStrategy[float], dtype: type, width: int = 0) -> Any:
        count = places * (width or 1)
        found: Any = np.array(draw(st.lists(items, min_size=count, max_size=count)), dtype=dtype)
        return found.reshape(places, width) if width else found

    counts = [column(COUNTS, np.int64, LOWER_TIERS if at == 1 else 0) for at in range(8)]
    tiered = RateColumns._fields.index("tier_fixed_s")
    widths = [0 if at < tiered else LOWER_TIERS for at in range(len(RateColumns._fields))]
    rates = RateColumns(*[column(SECONDS, np.float64, width) for width in widths])
    return tuple(counts), column(COUNTS, np.float64), rates


@given(columns(), REQUESTS, WEIGHTS, st.booleans())
def test_terms_are_those_of_the_twin(
    given: tuple[Any, ...], request: tuple[Any, ...], weights: tuple[Any, ...], whole: bool
) -> None:
    ours, others = (each.cost_terms(*given, request, weights, whole=whole) for each in (native, twin))
    assert_array_equal(ours, others)


@given(st.data(), st.integers(1, 7), st.booleans())
def test_pairs_are_those_of_the_twin(data: st.DataObject, places: int, excess: bool) -> None:
    def seconds(rows: int, width: int) -> Any:
        listed = st.lists(SECONDS, min_size=rows * width, max_size=rows * width)
        return np.array(data.draw(listed), dtype=np.float64).reshape(rows, width)

    rows = st.lists(st.integers(0, places - 1), min_size=1, max_size=places, unique=True)
    prefills, decodes = (np.array(data.draw(rows), dtype=np.int64) for _ in range(2))
    excess_s = seconds(len(prefills), len(decodes)) if excess else None
    promise = (data.draw(SECONDS), 0.3, 1.0, 1.5)
    terms = seconds(TERMS, places)
    of_native, of_twin = (
        each.cost_pairs(terms, prefills, decodes, excess_s, promise) for each in (native, twin)
    )
    for ours, others in zip(of_native, of_twin, strict=True):
        assert_array_equal(ours, others)


def test_columns_of_different_lengths_and_rows_of_no_place_are_refused() -> None:
    counts = [np.zeros(2, np.int64) for _ in range(8)]
    counts[1] = np.zeros((2, LOWER_TIERS), np.int64)
    rates = [np.zeros(2) for _ in range(6)] + [np.zeros((2, LOWER_TIERS))] * 2
    request, weights = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    columns = RateColumns(*rates)
    terms = native.cost_terms(tuple(counts), np.zeros(2), columns, request, weights, whole=True)
    assert terms.shape == (TERMS, 2)
    with pytest.raises(ValueError, match="an item for each place"):
        native.cost_terms(tuple(counts), np.zeros(3), columns, request, weights, whole=True)
    with pytest.raises(ValueError, match="must be 8 columns"):
        native.cost_terms(tuple(counts[:-1]), np.zeros(2), columns, request, weights, whole=True)
    for row in (-1, 2):
        with pytest.raises(ValueError, match="row is none of a place"):
            native.cost_pairs(terms, np.array([row]), np.array([0]), None, (1.0, 0.3, 1.0, 1.5))
    with pytest.raises(ValueError, match="an item for each place"):
        native.cost_pairs(terms, np.array([0]), np.array([1]), np.zeros((1, 2)), (1.0, 0.3, 1.0, 1.5))
