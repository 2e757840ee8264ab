"""Columns of figures: the native code and its twin read the same numbers, and refuse the same objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from kvasir import native
from kvasir.native import _twin_figures as twin

BOTH = pytest.mark.parametrize("core", [native, twin], ids=["native", "twin"])
PATHS = ("number", "inner.number", "twice")
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False))


@dataclass(slots=True)
class Inner:
    number: Any = None


@dataclass(slots=True)
class Outer:
    number: Any = None
    inner: Inner = field(default_factory=Inner)

    @property
    def twice(self) -> Any:
        return None if self.number is None else 2 * self.number


@given(st.lists(st.builds(Outer, NUMBERS, st.builds(Inner, NUMBERS)), max_size=5))
def test_figures_are_those_of_the_twin(objects: list[Outer]) -> None:
    ours, others = (each.Figures(PATHS).of(objects) for each in (native, twin))
    assert ours.shape == (len(PATHS), len(objects))
    assert_array_equal(ours, others)


@BOTH
def test_there_is_a_row_for_each_path_and_none_is_not_a_number(core: Any) -> None:
    found = core.Figures(PATHS).of([Outer(1, Inner(True)), Outer(None, Inner(0.5))])
    assert_array_equal(found, [[1.0, np.nan], [1.0, 0.5], [2.0, np.nan]])


@BOTH
@pytest.mark.parametrize(
    ("path", "objects", "error"),
    [
        ("none", [Outer()], AttributeError),
        ("number.none", [Outer(1)], AttributeError),
        ("number", [Outer(1), Outer([])], (TypeError, ValueError)),
        ("number", [Outer("text")], (TypeError, ValueError)),
    ],
)
def test_what_is_no_number_is_an_error(core: Any, path: str, objects: list[Outer], error: Any) -> None:
    with pytest.raises(error):
        core.Figures((path,)).of(objects)
