"""Figures as Python reads them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray


def joined(arrays: Sequence[NDArray[Any]]) -> bytes:
    """See `_figures.pyi`."""
    if not all(isinstance(each, np.ndarray) for each in arrays):
        raise TypeError("only arrays can be joined")
    return b"".join([each.tobytes("A") for each in arrays])


class Numbers:
    """See `_figures.pyi`."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._getters = [attrgetter(path) for path in paths]

    def of(self, objects: Sequence[object]) -> NDArray[np.float64]:
        """See `_figures.pyi`."""
        rows = [[read(each) for each in objects] for read in self._getters]
        return np.array(rows, np.float64).reshape(len(rows), len(objects))
