"""Figures as Python reads them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARKED = 64


class Arrays:
    """See `_figures.pyi`."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._getters = [attrgetter(path) for path in paths]

    def joined(self, object: object, more: Sequence[NDArray[Any]]) -> bytes:
        """See `_figures.pyi`."""
        arrays = [*(read(object) for read in self._getters), *more]
        if not all(isinstance(each, np.ndarray) for each in arrays):
            raise TypeError("only arrays can be joined")
        columns = sum(
            1 << at
            for at, each in enumerate(more[:_MARKED])
            if each.flags.f_contiguous and not each.flags.c_contiguous
        )
        return b"".join([*(each.tobytes("A") for each in arrays), columns.to_bytes(8, sys.byteorder)])


class Fields:
    """See `_figures.pyi`."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._getters = [attrgetter(path) for path in paths]

    def of(self, objects: Sequence[Any]) -> list[tuple[Any, ...]]:
        """See `_figures.pyi`."""
        return [tuple([read(each) for read in self._getters]) for each in objects]


class Numbers:
    """See `_figures.pyi`."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._getters = [attrgetter(path) for path in paths]

    def of(self, objects: Sequence[object]) -> NDArray[np.float64]:
        """See `_figures.pyi`."""
        rows = [[read(each) for each in objects] for read in self._getters]
        return np.array(rows, np.float64).reshape(len(rows), len(objects))


class Packer:
    """See `_figures.pyi`."""

    def __init__(self, encode: Callable[[object], bytes]) -> None:
        self._encode = encode

    def of(self, values: Sequence[object]) -> tuple[bytes, bytes]:
        """See `_figures.pyi`."""
        packed = list(map(self._encode, values))
        return b"".join(packed), array("Q", accumulate(map(len, packed), initial=0)).tobytes()
