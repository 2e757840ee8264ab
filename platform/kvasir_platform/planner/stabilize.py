"""Keeps pools from following every fluctuation of their load.

A replica that is removed and needed again costs a start. So a surplus one is kept for about as long as a
start (ski rental; Karlin, Manasse, Rudolph and Sleator, 1988): a pool shrinks to the size that was desired
for half of a window of two starts. If removed replicas are needed again repeatedly, that is too soon, and the
pool is calm instead: it shrinks only to the highest size desired within six starts. `backtest` tells whether
that pays, and a pool is calm in any case after many regrets within the hour, so that an oscillating load soon
meets a steady pool. A desired size that is near the present one changes nothing while nothing waits: a small
pool starts no replica for a small part of one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

NEAR = 0.1
"""Relative difference below which a need changes nothing: the tolerance of Kubernetes'
HorizontalPodAutoscaler."""
STARTS = 2.0
CALM = 3.0
"""Factor by which a calm pool's window is longer."""
_SOON = 2.0
"""Number of windows within which a replica that is needed again was removed too early."""
_MANY = 0.6
"""Share of the remaining replicas that counts as many; a smaller number is noise."""
_REMEMBERED_S = 3600.0
_BAD_LUCK = 2

Many = npt.NDArray[np.float64]
Which = npt.NDArray[np.bool_]


@dataclass(slots=True)
class DesiredWindow:
    """Recently desired sizes, of as many fleets as there are columns."""

    _desired_sizes: deque[tuple[float, Many]] = field(default_factory=deque)
    _since_s: float = math.inf

    def hold(
        self, need: Many, have: Many, now: float, *, over_s: float, pressing: Which, calm: Which
    ) -> Many:
        """Return the sizes for what is needed, in replicas and parts of one, given the present sizes.
        `pressing`: work waits; `calm`: the window is longer than `over_s`."""
        wanted = np.ceil(need)
        self._since_s = min(self._since_s, now)
        self._desired_sizes.append((now, wanted))
        while self._desired_sizes[0][0] < now - CALM * over_s:
            self._desired_sizes.popleft()
        desired_sizes = np.array([desired for _, desired in self._desired_sizes])
        lately = desired_sizes[sum(at < now - over_s for at, _ in self._desired_sizes) :]
        half = -np.sort(-lately, axis=0)[len(lately) // 2]
        kept = np.minimum(have, np.maximum(wanted, np.where(calm, desired_sizes.max(axis=0), half)))
        near = ~pressing & (need <= (1.0 + NEAR) * have) & (wanted >= (1.0 - NEAR) * have)
        if now - self._since_s < over_s / 2:
            # Earlier desired sizes are unknown: keep the present size.
            kept = have
        found: Many = np.where(near, have, np.where(wanted > have, wanted, kept))
        return found


@dataclass(slots=True)
class Regrets:
    """Counts how often many of a pool's replicas were removed, or would have been, and needed again before
    the saving was worth their start."""

    _at: deque[float] = field(default_factory=lambda: deque(maxlen=_BAD_LUCK + 1))
    _left: int = 0
    _down_s: float = float("-inf")

    def released(self, left: int, now: float) -> None:
        """Record a removal, after which `left` remain."""
        self._left, self._down_s = left, now

    def take(self, wanted: int, now: float, over_s: float) -> bool:
        """Take a desired size. Return whether there were more regrets within the last hour than chance
        explains."""
        many = wanted - self._left >= max(1, _MANY * self._left)
        if many and now - self._down_s < _SOON * over_s:
            self._at.append(now)
            # One regret per removal.
            self._down_s = float("-inf")
        return len(self._at) > _BAD_LUCK and now - self._at[0] < _REMEMBERED_S
