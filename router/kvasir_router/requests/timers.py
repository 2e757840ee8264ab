"""When a machine has to look at its requests again: it reads no clock, so that somebody has to tell it.

Most requests end long before their time is up. Their entries are not taken out one by one, but skipped when
they come up, and swept when they are the most.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Timers:
    """When to look at which request again. The owner skips requests that have ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def set(self, when: float, request_id: str) -> None:
        """Look at the request at `when`."""
        heapq.heappush(self._heap, (when, request_id))

    def next(self) -> float | None:
        """The earliest, which may turn out to be void."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[str]:
        """Take all that have come up."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def sweep(self, live: Collection[str]) -> None:
        """Drop the entries of ended requests when they outnumber the rest."""
        if len(self._heap) > 64 + 4 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def holds(self, when: float, request_id: str) -> bool:
        """Whether the request will be looked at at `when`; for checks."""
        return (when, request_id) in self._heap
