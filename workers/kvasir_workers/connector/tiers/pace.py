"""How long this engine takes to compute a prompt: a request waits no longer for blocks of a slow tier than it
would take to compute them.

A wait that ends then costs at most as much again as not to have waited, whatever the tier does, which is the
best bound there is without knowing what it will do (the ski-rental problem: Karlin et al., Competitive Snoopy
Caching, 1988).
"""

from __future__ import annotations

import math

_KEPT = 0.9
"""The part of what earlier prompts say that is kept with each further one."""


class PrefillPace:
    """The time of a prompt token, over the prompts of late, with all that ran beside them: the line through
    the origin with the least squares, on which short prompts, whose time is that of a step, count little."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._products = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Note that so many tokens of a prompt were computed in that time."""
        if tokens > 0:
            self._squares = _KEPT * self._squares + tokens * tokens
            self._products = _KEPT * self._products + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """Return how long so many tokens take; infinity before any were computed."""
        return tokens * self._products / self._squares if self._squares else math.inf
