"""The contract of the C++ module and of its Python twin `_twin`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def joined(arrays: Sequence[NDArray[Any]]) -> bytes:
    """The items of arrays, one array after the other, as they lie in memory: by rows, or by columns where an
    array is contiguous that way only. An array that is not contiguous is taken by rows. Raises TypeError for
    anything but an array."""

class Numbers:
    """Reads the same figures of many objects. A path is that of an attribute, with dots between its parts."""

    def __init__(self, paths: Sequence[str]) -> None: ...
    def of(self, objects: Sequence[object]) -> NDArray[np.float64]:
        """The figures: a row for each path, with an item for each object; NaN for None. Raises AttributeError
        for an object without such an attribute, and TypeError for one that is no number."""
