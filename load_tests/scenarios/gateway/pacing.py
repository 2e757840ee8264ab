"""The pacing of answers of all workers of the bench, whatever their protocol.

A gateway's cost depends on how its work is batched, so all systems get the same pacing: a request for one
token is answered at once, short answers come in short steps, and long ones at a stream's rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

AT_ONCE = 1
"""Answers of up to this many tokens are not paced: for TTFT."""
SHORT = 8
"""Answers of up to this many tokens come one token per short step."""
SHORT_STEP_S = 0.005
TOKENS_PER_S = 50.0
"""Pacing of longer answers, for each stream."""
TOKEN = " the"
"""The text of every token, so that clients can count tokens. Nothing else in an answer contains it."""


class Ticker:
    """Calls `tick` every `period_s`, starting at `phase_s`, while it returns True. A late tick delays those
    after it, so that ticks do not come in bursts that no engine would produce."""

    def __init__(self, tick: Callable[[], bool], period_s: float, phase_s: float = 0.0) -> None:
        self._tick = tick
        self._period_s = period_s
        self._phase_s = phase_s
        self._due_s: float | None = None

    def start(self) -> None:
        """Start the timer unless it runs."""
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
