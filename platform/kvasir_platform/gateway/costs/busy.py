"""The time in which at least one request ran on a worker, from the times of requests as they end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

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
