"""How many lines of batches run at a time: one more after each that ended, fewer after the router refused
one.

Lines that the router refuses have reached no worker and are sent again, at first soon, then at longer
intervals: a refusal takes a decision of the router each time.
"""

from __future__ import annotations

from collections.abc import Callable

_FIRST_S, _LONGEST_S = 0.02, 1.0


class LinePace:
    """Additive increase and multiplicative decrease, between 1 and what `most` returns. Times in seconds."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._limit = 8
        self._pause_s = _FIRST_S
        self._next_s = 0.0
        self.running = 0

    def wait_s(self, now: float) -> float | None:
        """Return the time until a line may start, 0 for at once; None until one ends."""
        if self.running >= min(self._limit, self._most()):
            return None
        return max(0.0, self._next_s - now)

    def started(self) -> None:
        """A line was sent to the router."""
        self.running += 1

    def ended(self) -> None:
        """A line has its result."""
        self.running -= 1
        self._limit = min(self._most(), self._limit + 1)
        self._pause_s = _FIRST_S

    def refused(self, now: float) -> None:
        """The router had no capacity for a line."""
        self.running -= 1
        if now >= self._next_s:
            # One step for all that were refused together.
            self._limit = max(1, min(self._limit, self.running + 1))
            self._next_s = now + self._pause_s
            self._pause_s = min(_LONGEST_S, 2 * self._pause_s)

    def dropped(self) -> None:
        """A line was given up."""
        self.running -= 1
