"""Timers of requests for a machine that reads no clock.

Most requests end long before their timers. Entries of ended requests are skipped when they are due, and swept
when they outnumber the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Timers:
    """Due times by request. The owner skips requests that have ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def set(self, when: float, request_id: str) -> None:
        """Set a timer for the request."""
        heapq.heappush(self._heap, (when, request_id))

    def next(self) -> float | None:
        """Return the earliest time, which may belong to an ended request."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[str]:
        """Remove and return the requests that are due."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def sweep(self, live: Collection[str]) -> None:
        """Drop the entries of ended requests if they outnumber the rest."""
        if len(self._heap) > 64 + 4 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def holds(self, when: float, request_id: str) -> bool:
        """Whether the request has a timer at `when`; for checks."""
        return (when, request_id) in self._heap
