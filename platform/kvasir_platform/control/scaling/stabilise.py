"""Keeps a pool from breathing with every breath of its load.

Down only to the most that was wanted within a window. When many of the replicas that were let go are wanted
back before they have paid for themselves, they were let go too early. Two such regrets are bad luck; from the
third within an hour on, each doubles the window, up to a bound. So a load that flaps soon finds a pool that
stands still, and a load that does so no longer is followed again an hour later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_SOON = 10.0
"""Replicas that are wanted back within so many times the window at rest were let go too early."""
_MANY = 0.4
"""Of those that were left, as many as this part of them: less is the noise of every load."""
_REMEMBERED_S = 3600.0
_BAD_LUCK = 2
_DOUBLINGS = 4


@dataclass(slots=True)
class Window:
    """Of one pool. `least_s`: how long fewer must have been wanted, at rest."""

    least_s: float
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _regrets: deque[float] = field(default_factory=lambda: deque(maxlen=_BAD_LUCK + _DOUBLINGS))
    _left: int = 0
    _down_s: float = float("-inf")

    @property
    def seconds(self) -> float:
        """How long fewer must have been wanted, as of the last wish."""
        return float(self.least_s * 2 ** max(0, len(self._regrets) - _BAD_LUCK))

    def hold(self, wanted: int, have: int, now: float) -> int:
        """What is done about a wish, with so many at hand."""
        while self._regrets and now - self._regrets[0] > _REMEMBERED_S:
            self._regrets.popleft()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.seconds:
            self._wanted.popleft()
        if wanted <= have:
            return min(have, max(most for _, most in self._wanted))
        many = wanted - self._left >= max(1, _MANY * self._left)
        if many and now - self._down_s < _SOON * self.least_s:
            self._regrets.append(now)
            # One regret for one release.
            self._down_s = float("-inf")
        return wanted

    def released(self, left: int, now: float) -> None:
        """Some were let go, and so many are left."""
        self._left, self._down_s = left, now
