"""Keeps a pool from breathing with every breath of its load.

Down only to the most that was wanted within a window. A replica that was let go and is wanted back sooner
than it takes to have paid for itself was let go too early: the window is doubled for each such regret, up to
a bound, and shrinks again while there are none. So a load that flaps soon finds a pool that stands still.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_LONGEST = 16.0
"""So many times the window at rest."""
_CALM = 10.0
"""After so many windows without a regret, it is halved."""


@dataclass(slots=True)
class Window:
    """Of one pool. `least_s`: how long fewer must have been wanted, at rest."""

    least_s: float
    _factor: float = 1.0
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _down_s: float = float("-inf")
    _eased_s: float = float("-inf")

    @property
    def seconds(self) -> float:
        """How long fewer must have been wanted, as of now."""
        return self.least_s * self._factor

    def hold(self, wanted: int, have: int, now: float) -> int:
        """What is done about a wish, with so many at hand."""
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.seconds:
            self._wanted.popleft()
        if wanted > have:
            if now - self._down_s < 4 * self.seconds:
                self._factor = min(_LONGEST, 2 * self._factor)
                # One regret for one release.
                self._down_s = float("-inf")
            self._eased_s = now
            return wanted
        if now - self._eased_s > _CALM * self.seconds:
            self._factor = max(1.0, self._factor / 2)
            self._eased_s = now
        return min(have, max(most for _, most in self._wanted))

    def released(self, now: float) -> None:
        """Some were let go."""
        self._down_s = now
