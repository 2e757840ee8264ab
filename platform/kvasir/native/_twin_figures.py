"""The Python twin of the native columns of figures, with numpy. `_native.pyi` has the contract."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from kvasir.ports.routing import FloatColumn


class Figures:
    """See `_native.pyi`."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._getters = [attrgetter(path) for path in paths]

    def of(self, objects: Sequence[object]) -> FloatColumn:
        """See `_native.pyi`."""
        rows = [list(map(getter, objects)) for getter in self._getters]
        # For None, numpy has NaN.
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(objects))
