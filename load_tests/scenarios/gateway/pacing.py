"""The tempo at which every worker of the bench answers, whatever it speaks.

What a gateway costs depends on how its work is bunched, so all of them are given the same: a request for one
token is answered at once, short answers come in steps, and long ones at the tempo of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

AT_ONCE = 1
"""Answers of so many tokens have no tempo: for times to the first token."""
SHORT = 8
"""Answers of up to so many tokens come one token a short step."""
SHORT_STEP_S = 0.005
TOKENS_PER_S = 50.0
"""Longer answers, for each stream."""
TOKEN = " the"
"""What every token reads, so that clients can count them. Nothing else in an answer contains it."""


class Ticker:
    """Calls `tick` every `period_s`, from `phase_s` on, while it returns True. A late tick delays those after
    it: nothing comes in bursts that no engine would make."""

    def __init__(self, tick: Callable[[], bool], period_s: float, phase_s: float = 0.0) -> None:
        self._tick = tick
        self._period_s = period_s
        self._phase_s = phase_s
        self._due_s: float | None = None

    def start(self) -> None:
        """Begin, unless it runs."""
        if self._due_s is None:
            loop = asyncio.get_running_loop()
            self._due_s = loop.time() + self._period_s + self._phase_s
            loop.call_at(self._due_s, self._run)

    def _run(self) -> None:
        assert self._due_s is not None
        if not self._tick():
            self._due_s = None
            return
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s + self._period_s, loop.time())
        loop.call_at(self._due_s, self._run)
