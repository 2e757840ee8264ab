"""What native code reads of arrays and objects is what Python reads of them, and so it is in the twin."""

from __future__ import annotations

import math
import shutil
import sys
from array import array
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
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


def by_columns(one: Any) -> bool:
    return bool(one.flags.f_contiguous and not one.flags.c_contiguous)


@either
@given(st.lists(any_array(), min_size=2, max_size=2), st.lists(any_array(), max_size=4))
def test_arrays_are_joined_as_they_lie_in_memory(code: ModuleType, held: list[Any], more: list[Any]) -> None:
    expected = b"".join(each.tobytes("F" if by_columns(each) else "C") for each in [*held, *more])
    columns = sum(1 << at for at, each in enumerate(more) if by_columns(each))
    expected += columns.to_bytes(8, sys.byteorder)
    read = code.Arrays(("at_s", "inner.rate"))
    holder = Slotted(Inner(0, held[1]), held[0])
    assert read.joined(holder, more) == read.joined(holder, tuple(more)) == expected
    assert code.Arrays(()).joined(None, [*held, *more])[:-8] == expected[:-8]


@either
@pytest.mark.parametrize("wrong", [b"abc", [1.0], None, 7])
def test_only_arrays_are_joined(code: ModuleType, wrong: object) -> None:
    with pytest.raises(TypeError, match="only arrays"):
        code.Arrays(()).joined(None, [np.zeros(2), wrong])
    with pytest.raises(TypeError, match="only arrays"):
        code.Arrays(("at_s",)).joined(Slotted(None, wrong), [])  # type: ignore[arg-type]  # what is tested
    with pytest.raises(AttributeError):
        code.Arrays(("at_s",)).joined(object(), [])


class Level(IntEnum):
    """A number with a name, which msgspec packs as its number."""

    LOW = 1


class Tagged(msgspec.Struct, tag=True):
    """A struct that is packed with its type."""

    size: int = 1


class Row(msgspec.Struct, array_like=True):
    """A struct that is packed without names."""

    size: int = 1


class Short(msgspec.Struct, omit_defaults=True):
    """A struct that is packed without what is usual."""

    size: int = 1
    other: str = ""


class Renamed(msgspec.Struct, rename={"size": "s" * 40}):
    """A struct whose keys are other than its fields."""

    size: int = 1


INTEGERS = st.sampled_from(
    [each + more for power in range(65) for each in (2**power, -(2**power)) for more in (-1, 0, 1)]
).filter(lambda each: -(2**63) <= each < 2**64)
SIZES = st.sampled_from([0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536])
LEAVES = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | SIZES.map(lambda size: "a" * size)
    | SIZES.map(bytes)
    | st.sampled_from([Level.LOW, Tagged(), Row(), Short(), Renamed(), np.float64(1.5), {"a": 1}])
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=20).map(tuple)
        | st.builds(Inner, inner, inner)
        | st.builds(Named, inner)
    ),
    max_leaves=20,
)
ENCODE = msgspec.msgpack.Encoder(enc_hook=np.generic.item).encode


@either
@given(st.lists(NESTED, max_size=5))
def test_values_are_packed_as_msgspec_packs_them(code: ModuleType, given: list[Any]) -> None:
    packer = code.Packer(ENCODE)
    expected = [ENCODE(each) for each in given]
    bounds = array("Q", accumulate(map(len, expected), initial=0))
    for _ in range(2):
        assert packer.of(given) == (b"".join(expected), bounds.tobytes())


@either
def test_what_msgspec_does_not_pack_is_an_error(code: ModuleType) -> None:
    packer = code.Packer(ENCODE)
    with pytest.raises((TypeError, AttributeError)):
        packer.of([(1, object())])
    with pytest.raises(OverflowError):
        packer.of([2**64])
    with pytest.raises(UnicodeEncodeError):
        packer.of(["\ud800"])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        packer.of([endless])
    assert packer.of([Inner(1)])[0] == ENCODE(Inner(1))


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
@given(st.data())
def test_fields_of_objects_are_their_attributes(code: ModuleType, data: st.DataObject) -> None:
    kinds = st.sampled_from([Slotted, Plain, Named])
    given = data.draw(st.lists(st.builds(lambda kind, *of: kind(*of), kinds, st.builds(Inner), FLOATS)))
    read = code.Fields(("at_s", "inner.count", "inner"))
    for _ in range(2):
        assert read.of(given) == [(each.at_s, each.inner.count, each.inner) for each in given]
    assert code.Fields(()).of(given) == [()] * len(given)
    with pytest.raises(AttributeError):
        read.of([*given, object()])


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
