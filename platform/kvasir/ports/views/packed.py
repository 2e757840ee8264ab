"""The newest of many rows of values, kept as bytes.

Thousands of rows are kept, and few of them are ever read. As objects, each would have dozens of allocations
that have left the processor's caches by the time they are freed, and a full collection of Python's garbage
collector would visit them all, for milliseconds. So the rows that are added together become one block of
bytes, and a row becomes objects when it is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.core.figures import Packer

_ENCODER = msgspec.msgpack.Encoder(enc_hook=np.generic.item)
_PACKER = Packer(_ENCODER.encode)
_NAMED = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
Figures = Callable[[int], NDArray[np.float64]]
"""Returns a view of the figures of one column, in no particular order of rows."""
_Ring = TypeVar("_Ring", list[bytes], "array[int]", "array[float]")


def packed(value: object) -> bytes:
    """Return a value as MessagePack: None, numbers, text, bytes, and sequences and dataclasses of such. An
    integer has at most 64 bits."""
    return _ENCODER.encode(value)


class PackedRows:
    """At most `capacity` rows, from the earliest to the latest; further ones replace the earliest. A row has
    a name, a value that is packed, a figure for each of so many `columns`, and bytes that it may share with
    other rows. The numbers of rows are valid until some are added."""

    __slots__ = ("_begins", "_blocks", "_capacity", "_columns", "_ends", "_hashes", "_next", "_shared")

    def __init__(self, capacity: int, columns: int = 0) -> None:
        self._capacity = capacity
        # Rings of equal length, with an item for each row. Bytes are not tracked by the garbage collector.
        self._blocks: list[bytes] = []
        self._shared: list[bytes] = []
        self._begins, self._ends, self._hashes = array("Q"), array("Q"), array("q")
        self._columns = [array("d") for _ in range(columns)]
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(
        self,
        names: Sequence[str],
        values: Sequence[object],
        *,
        shared: Sequence[bytes] | None = None,
        figures: NDArray[np.float64] | None = None,
    ) -> None:
        """Add rows, the latest last. `figures` has a row for each column, with those of all rows."""
        count = min(len(names), self._capacity)
        if not count:
            return
        block, bounds = _PACKER.of(list(zip(names[-count:], values[-count:], strict=True)))
        ends = array("Q", bounds)
        self._write(self._blocks, [block] * count)
        self._write(self._shared, [b""] * count if shared is None else list(shared[-count:]))
        self._write(self._begins, ends[:-1])
        self._write(self._ends, ends[1:])
        hashes = np.fromiter(map(hash, names[-count:]), np.int64, count)
        self._write(self._hashes, array("q", hashes.tobytes()))
        for column, added in zip(self._columns, () if figures is None else figures, strict=True):
            items: array[float] = array("d", added[-count:].tobytes())
            self._write(column, items)
        self._next = (self._next + count) % self._capacity

    def _write(self, ring: _Ring, items: _Ring) -> None:
        """Write the items of new rows from the next place on, and from the first one after the last."""
        fit = min(len(items), self._capacity - self._next)
        ring[self._next : self._next + fit] = items[:fit]
        ring[: len(items) - fit] = items[fit:]

    def value(self, row: int) -> msgspec.Raw:
        """Return the packed value of a row."""
        return self._row(self._place(row))[1]

    def shared(self, row: int) -> bytes:
        """Return the bytes that a row shares with others, b"" if it has none."""
        return self._shared[self._place(row)]

    def column(self, make: Callable[[Figures], NDArray[Any]]) -> NDArray[np.float64]:
        """Return a figure of all rows, in their order, that is made of those that are kept. What `make` is
        given are views, which it must not keep: a ring that is seen from elsewhere cannot grow."""
        made, oldest = make(lambda number: np.frombuffer(self._columns[number])), self._oldest
        return np.concatenate((made[oldest:], made[:oldest]), dtype=np.float64)

    def find(self, name: str) -> int | None:
        """Return the latest row with that name, None if there is none. Takes microseconds for thousands of
        rows: they are found by their hashes, as an index by name costs more than few searches save."""
        (places,) = np.nonzero(np.array(self._hashes) == hash(name))
        rows = sorted(((places - self._oldest) % max(1, len(self))).tolist(), reverse=True)
        return next((row for row in rows if self._row(self._place(row))[0] == name), None)

    @property
    def _oldest(self) -> int:
        return self._next if len(self) == self._capacity else 0

    def _place(self, row: int) -> int:
        return (self._oldest + row) % len(self)

    def _row(self, place: int) -> tuple[str, msgspec.Raw]:
        text = memoryview(self._blocks[place])[self._begins[place] : self._ends[place]]
        return _NAMED.decode(text)
