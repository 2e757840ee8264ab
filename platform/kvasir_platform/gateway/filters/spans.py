"""Disjoint spans of a text, kept in order: matches that filters and held text remember."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Spans:
    """Spans of positions; adjacent spans are merged."""

    __slots__ = ("_begins", "_ends")

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, end: int) -> None:
        """Add the span from `begin` to `end`, which is after all others."""
        begins, ends = self._begins, self._ends
        first, after = bisect_left(ends, begin), bisect_right(begins, end)
        if first < after:
            begin, end = min(begin, begins[first]), max(end, ends[after - 1])
        begins[first:after] = (begin,)
        ends[first:after] = (end,)

    def meet(self, begin: int, end: float) -> bool:
        """Return whether any span overlaps `begin` to `end`."""
        at = bisect_right(self._ends, begin)
        return at < len(self._begins) and self._begins[at] < end

    def take(self, upto: int) -> list[tuple[int, int]]:
        """Remove and return, in order, the spans that begin at `upto` or before."""
        count = bisect_right(self._begins, upto)
        taken = list(zip(self._begins[:count], self._ends[:count], strict=True))
        del self._begins[:count], self._ends[:count]
        return taken

    def forget(self, upto: int) -> None:
        """Remove the spans that end at `upto` or before."""
        count = bisect_right(self._ends, upto)
        del self._begins[:count], self._ends[:count]
