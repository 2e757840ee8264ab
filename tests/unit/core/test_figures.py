"""What native code reads of arrays and objects is what Python reads of them, and so it is in the twin."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvasir.core import figures
from kvasir.core.figures import _twin as twin
from kvasir.core.values import value

BOTH: list[ModuleType] = [twin, figures]
either = pytest.mark.parametrize("code", BOTH, ids=["twin", "native"])
TYPES = st.sampled_from([np.int64, np.float64, np.uint8, np.bool_])
SHAPES = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=4)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_the_native_code_is_used_where_it_can_be_built() -> None:
    assert figures.Numbers.__module__ != twin.__name__, "make install-dev"


@st.composite
def any_array(draw: st.DrawFn) -> Any:
    """An array in the order of rows or of columns, or every second item of one."""
    made: Any = draw(arrays.arrays(draw(TYPES), draw(SHAPES)))
    return draw(st.sampled_from([made, np.asfortranarray(made), made.T, made[::2], made.T[1:]]))


@either
@given(st.lists(any_array(), max_size=4))
def test_arrays_are_joined_as_they_lie_in_memory(code: ModuleType, given: list[Any]) -> None:
    expected = b"".join(
        each.tobytes("F" if each.flags.f_contiguous and not each.flags.c_contiguous else "C")
        for each in given
    )
    assert code.joined(given) == code.joined(tuple(given)) == expected


@either
@pytest.mark.parametrize("wrong", [b"abc", [1.0], None, 7])
def test_only_arrays_are_joined(code: ModuleType, wrong: object) -> None:
    with pytest.raises(TypeError, match="only arrays"):
        code.joined([np.zeros(2), wrong])


@value
class Inner:
    """A struct."""

    count: int = 0
    rate: float | None = None


@dataclass(slots=True)
class Slotted:
    """A class whose attributes have slots."""

    inner: Any
    at_s: float | None = None
    many: bool = False


@dataclass
class Plain:
    """A class with a dictionary, and a property."""

    inner: Any
    at_s: float | None = None

    @property
    def many(self) -> bool:
        return self.at_s is not None


class Named(NamedTuple):
    """A tuple with names."""

    inner: Any
    at_s: float | None = None
    many: bool = True


PATHS = ("at_s", "inner.count", "inner.rate", "many", "inner.count")
FLOATS = st.none() | st.floats(width=32) | st.integers(-(2**60), 2**60)


def as_number(read: float | None) -> float:
    return math.nan if read is None else float(read)


@either
@given(st.lists(st.builds(Slotted, st.builds(Inner, st.integers(0, 9), FLOATS), FLOATS)))
def test_figures_of_objects_are_their_attributes(code: ModuleType, given: list[Slotted]) -> None:
    found = code.Numbers(PATHS).of(given)
    assert (found.shape, found.dtype) == ((len(PATHS), len(given)), np.float64)
    expected = [
        [as_number(each.at_s) for each in given],
        [as_number(each.inner.count) for each in given],
        [as_number(each.inner.rate) for each in given],
        [as_number(each.many) for each in given],
        [as_number(each.inner.count) for each in given],
    ]
    np.testing.assert_array_equal(found, np.array(expected).reshape(found.shape))


@either
@given(st.data())
def test_objects_of_several_classes_can_follow_each_other(code: ModuleType, data: st.DataObject) -> None:
    inner = st.builds(Inner, st.integers(0, 9), FLOATS)
    kinds = st.sampled_from([Slotted, Plain, Named])
    given = data.draw(st.lists(st.builds(lambda kind, *of: kind(*of), kinds, inner, FLOATS), max_size=6))
    read = code.Numbers(PATHS)
    for _ in range(2):
        found = read.of(tuple(given))
        np.testing.assert_array_equal(found[0], [as_number(each.at_s) for each in given])
        np.testing.assert_array_equal(found[3], [as_number(each.many) for each in given])


@either
def test_an_attribute_that_is_missing_or_no_number_is_an_error(code: ModuleType) -> None:
    read = code.Numbers(("at_s", "inner.count"))
    read.of([Slotted(Inner())])
    with pytest.raises(AttributeError):
        read.of([Slotted(None)])
    with pytest.raises(AttributeError):
        read.of([object()])
    unset = Slotted(Inner())
    del unset.at_s
    with pytest.raises(AttributeError):
        read.of([unset])
    with pytest.raises((TypeError, ValueError)):
        read.of([Slotted(Inner(), "soon")])  # type: ignore[arg-type]  # what is tested
    assert read.of([Slotted(Inner(), 1.5)]).tolist() == [[1.5], [0.0]]
