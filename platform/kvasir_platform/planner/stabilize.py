"""Keeps pools from breathing with every breath of their load.

A replica that is let go and wanted back costs a start. So one that is not needed is kept for about as long as
that (ski rental; Karlin, Manasse, Rudolph and Sleator, 1988): a pool goes down to what was wanted for half of
a window of two starts. Where replicas that went are wanted back again and again that is too soon, and a pool
is kept calm instead: down only to the most that was wanted within six starts. Whether that pays, `backtest`
tells; and it is done in any case where much was regretted within the hour, so that a load that flaps soon
finds a pool that hardly moves. And a size that is nearly what there is, is left alone while nothing waits.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

NEAR = 0.1
"""So near to what there is, a wish is left alone: the tolerance of Kubernetes' HorizontalPodAutoscaler."""
STARTS = 2.0
CALM = 3.0
"""So many times as long a calm pool looks back."""
_SOON = 2.0
"""Replicas that are wanted back within so many windows were let go too early."""
_MANY = 0.6
"""Of those that were left, as many as this part of them: less is the noise of every load."""
_REMEMBERED_S = 3600.0
_BAD_LUCK = 2

Many = npt.NDArray[np.float64]
Which = npt.NDArray[np.bool_]


@dataclass(slots=True)
class DesiredWindow:
    """What was wanted lately, of as many fleets as there are columns."""

    _desired_sizes: deque[tuple[float, Many]] = field(default_factory=deque)
    _since_s: float = math.inf

    def hold(
        self, wanted: Many, have: Many, now: float, *, over_s: float, pressing: Which, calm: Which
    ) -> Many:
        """What is done about wishes, in replicas, with so many at hand. `pressing`: something waits; `calm`:
        they look back for longer than `over_s`, the window."""
        self._since_s = min(self._since_s, now)
        self._desired_sizes.append((now, wanted))
        while self._desired_sizes[0][0] < now - CALM * over_s:
            self._desired_sizes.popleft()
        desired_sizes = np.array([desired for _, desired in self._desired_sizes])
        lately = desired_sizes[sum(at < now - over_s for at, _ in self._desired_sizes) :]
        half = -np.sort(-lately, axis=0)[len(lately) // 2]
        kept = np.minimum(have, np.maximum(wanted, np.where(calm, desired_sizes.max(axis=0), half)))
        near = ~pressing & (np.abs(wanted - have) <= NEAR * have)
        if now - self._since_s < over_s / 2:
            # What was wanted before is not known: what there is had its reasons.
            kept = have
        found: Many = np.where(near, have, np.where(wanted > have, wanted, kept))
        return found


@dataclass(slots=True)
class Regrets:
    """How often many of a pool's replicas were let go, or would have been, and wanted back before they had
    paid for themselves."""

    _at: deque[float] = field(default_factory=lambda: deque(maxlen=_BAD_LUCK + 1))
    _left: int = 0
    _down_s: float = float("-inf")

    def released(self, left: int, now: float) -> None:
        """Some were let go, and so many are left."""
        self._left, self._down_s = left, now

    def take(self, wanted: int, now: float, over_s: float) -> bool:
        """A wish; returns whether too much was regretted within the last hour for bad luck."""
        many = wanted - self._left >= max(1, _MANY * self._left)
        if many and now - self._down_s < _SOON * over_s:
            self._at.append(now)
            # One regret for one release.
            self._down_s = float("-inf")
        return len(self._at) > _BAD_LUCK and now - self._at[0] < _REMEMBERED_S
