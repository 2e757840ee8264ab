"""How often a forecast may be too low: just as often as the promise that was given bears.

The level is turned by what comes of it: up by the requests that missed their service level, down by those
that may (adaptive conformal inference; Gibbs and Candes, 2021). What is missed in the long run is then what
was aimed at, whatever the load is like, but for the width of the range over the number of turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BEGIN = 4.5
"""On the logit: 99 of 100."""
_LEAST, _MOST = -4.0, 7.0
_GAIN = 1.0
_USUAL_S = 1800.0
"""Over so much time the usual number of requests is averaged."""


@dataclass(slots=True)
class Caution:
    """Of one model. `aim` is the part of its requests that may miss their service level."""

    aim: float
    _logit: float = _BEGIN
    _usual: float = 0.0

    @property
    def level(self) -> float:
        """In how many cases of one a forecast must suffice."""
        return 1.0 / (1.0 + math.exp(-self._logit))

    def learn(self, judged: int, missed: int, seconds: float) -> None:
        """So many requests ended, and so many of them missed what a larger pool would have given them."""
        rate = judged / seconds
        self._usual += (1.0 - math.exp(-seconds / _USUAL_S)) * (rate - self._usual)
        if self._usual <= 0.0:
            return
        turn = _GAIN * (missed - self.aim * judged) / (self._usual * seconds) * seconds / 15.0
        self._logit = min(_MOST, max(_LEAST, self._logit + turn))
