"""The contract of the C++ module and of its Python twin `_twin`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

class Arrays:
    """Reads the same arrays of objects. A path is that of an attribute, with dots between its parts."""

    def __init__(self, paths: Sequence[str]) -> None: ...
    def joined(self, object: object, more: Sequence[NDArray[Any]]) -> bytes:
        """The items of the arrays of an object and then of more, one array after the other, as they lie in
        memory: by rows, or by columns where an array is contiguous that way only. An array that is not
        contiguous is taken by rows. After them, as a native uint64, in which of the first 64 of `more` items
        are taken by columns, a bit each. Raises AttributeError for an object without such an attribute, and
        TypeError for anything but an array."""

class Fields:
    """Reads the same fields of many objects. A path is that of an attribute, with dots between its parts."""

    def __init__(self, paths: Sequence[str]) -> None: ...
    def of(self, objects: Sequence[Any]) -> list[tuple[Any, ...]]:
        """What each object has at each path. Raises AttributeError for an object without such an
        attribute."""

class Numbers:
    """Reads the same figures of many objects. A path is that of an attribute, with dots between its parts."""

    def __init__(self, paths: Sequence[str]) -> None: ...
    def of(self, objects: Sequence[object]) -> NDArray[np.float64]:
        """The figures: a row for each path, with an item for each object; NaN for None. Raises AttributeError
        for an object without such an attribute, and TypeError for one that is no number."""

class Packer:
    """Packs values as MessagePack, like msgspec: None, booleans, numbers, text, bytes, tuples, lists, and
    structs of msgspec without options. `encode` packs any other value, whose bytes are taken as they are."""

    def __init__(self, encode: Callable[[object], bytes]) -> None: ...
    def of(self, values: Sequence[object]) -> tuple[bytes, bytes]:
        """All values one after the other, and as native uint64 where each begins and the last ends. Raises
        what `encode` raises, UnicodeEncodeError for text that is not Unicode, and RecursionError for values
        that are nested too deeply."""
