"""The time in which at least one request ran on a worker, from the times of requests as they end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

MOST_SPANS = 256
"""Spans of one worker in one hour that can still grow together; what is before them is closed."""


class BusyTime:
    """The union of spans of time. `begin_s` and `end_s` bound what counts."""

    __slots__ = ("_begins", "_closed_s", "_ends", "_high_s", "_low_s")

    def __init__(self, begin_s: float, end_s: float) -> None:
        self._low_s = begin_s
        self._high_s = end_s
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._closed_s = 0.0

    def add(self, begin_s: float, end_s: float) -> None:
        """Add one span, in any order."""
        begins, ends = self._begins, self._ends
        if ends and begins[-1] <= begin_s <= ends[-1]:
            # Requests overlap those that ended just before them.
            if end_s > ends[-1]:
                ends[-1] = min(end_s, self._high_s)
            return
        begin_s, end_s = max(begin_s, self._low_s), min(end_s, self._high_s)
        if begin_s >= end_s:
            return
        first, after = bisect_left(ends, begin_s), bisect_right(begins, end_s)
        if first < after:
            begin_s, end_s = min(begin_s, begins[first]), max(end_s, ends[after - 1])
        begins[first:after] = [begin_s]
        ends[first:after] = [end_s]
        if len(begins) > MOST_SPANS:
            self._low_s = ends[0]
            self._closed_s += ends.pop(0) - begins.pop(0)

    @property
    def seconds(self) -> float:
        """The length of the union."""
        return self._closed_s + sum(self._ends) - sum(self._begins)


def joined_spans(
    of: NDArray[np.intp], begins: NDArray[np.float64], ends: NDArray[np.float64]
) -> Iterable[tuple[int, float, float]]:
    """Return the unions of spans that overlap, for each number in `of` by itself: the number, begin and end
    of each union. Most requests of a worker overlap, so few remain."""
    order = np.lexsort((begins, of))
    of, begins, ends = of[order], begins[order], ends[order]
    if not len(of):
        return ()
    # A worker's spans are moved behind those of the one before it, so that the latest end is its own.
    apart_s = of * (ends.max() - begins.min() + 1.0)
    latest = np.maximum.accumulate(ends + apart_s)
    first = np.flatnonzero(np.concatenate(([True], begins[1:] + apart_s[1:] > latest[:-1])))
    last = np.concatenate((first[1:], [len(of)])) - 1
    return zip(of[first].tolist(), begins[first].tolist(), (latest - apart_s)[last].tolist(), strict=True)
