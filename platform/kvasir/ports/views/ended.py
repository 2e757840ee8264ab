"""The requests that ended last, with their figures as columns.

The console reads thousands of them every second. They have not been used for long then, so visiting each
takes milliseconds, for which streams wait; columns are read in microseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from kvasir.ports.views.summaries import RequestSummary

EndedColumn = Literal["finished_s", "lasted_s", "prompt_tokens", "cached_tokens"]


class EndedRequests(Sequence[RequestSummary]):
    """At most `capacity` requests of one model, from the earliest to the latest; further ones replace the
    earliest. A row is valid until the next request ends."""

    __slots__ = ("_capacity", "_columns", "_kept", "_oldest")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: list[RequestSummary] = []
        self._columns: dict[EndedColumn, array[float]] = {
            "finished_s": array("d"),
            "lasted_s": array("d"),
            "prompt_tokens": array("d"),
            "cached_tokens": array("d"),
        }
        self._oldest = 0

    @classmethod
    def of(cls, summaries: Iterable[RequestSummary]) -> Self:
        """Return these requests, all kept."""
        listed = list(summaries)
        made = cls(len(listed))
        for summary in listed:
            made.add(summary)
        return made

    def add(self, summary: RequestSummary) -> None:
        """Add a request that has ended after all others."""
        usage, finished_s = summary.usage, summary.finished_s
        finished, lasted, prompt, cached = self._columns.values()
        if len(self._kept) < self._capacity:
            self._kept.append(summary)
            finished.append(finished_s)
            lasted.append(finished_s - summary.arrival_s)
            prompt.append(usage.prompt_tokens)
            cached.append(usage.cached_tokens)
        elif self._capacity:
            row = self._oldest
            self._kept[row] = summary
            finished[row] = finished_s
            lasted[row] = finished_s - summary.arrival_s
            prompt[row] = usage.prompt_tokens
            cached[row] = usage.cached_tokens
            self._oldest = (row + 1) % self._capacity

    def column(self, name: EndedColumn) -> NDArray[np.float64]:
        """Return a copy of one figure of all requests, in their order: when it ended and how long it took, in
        seconds, and tokens of its prompt."""
        figures = np.array(self._columns[name])
        return np.concatenate((figures[self._oldest :], figures[: self._oldest]))

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, row: int) -> RequestSummary: ...

    @overload
    def __getitem__(self, row: slice) -> list[RequestSummary]: ...

    def __getitem__(self, row: int | slice) -> RequestSummary | list[RequestSummary]:
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self._kept)))]
        if not -len(self._kept) <= row < len(self._kept):
            raise IndexError(row)
        return self._kept[(self._oldest + row) % len(self._kept)]

    def __iter__(self) -> Iterator[RequestSummary]:
        yield from self._kept[self._oldest :]
        yield from self._kept[: self._oldest]
