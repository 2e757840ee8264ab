"""One thread for each tier below the arena, so that a step loop never waits for disk or network.

Lookups run before reads, and reads before writes: a request waits for the former two, but not for a write. A
call into a medium that hangs cannot be cancelled. The thread then reports that it is stuck, and its tier is
skipped until the call returns.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum

Job = Callable[[], None]
Tend = Callable[[], bool]

_log = logging.getLogger(__name__)

MAX_WAITING = 4096
TEND_S = 1.0


class Urgency(IntEnum):
    """Priority of a job, the most urgent first."""

    LOOKUP = 0
    READ = 1
    WRITE = 2


class TierThread:
    """Runs jobs one at a time by urgency, first in first out within one urgency.

    `maintain` runs soon after the start and then when no job waits: again at once while it returns True, else
    every TEND_S. At most MAX_WAITING jobs of each urgency wait. Jobs should not raise.
    """

    def __init__(self, name: str, now: Callable[[], float], maintain: Tend) -> None:
        self._name = name
        self._now = now
        self._tend = maintain
        self._queues: tuple[deque[Job], ...] = tuple(deque() for _ in Urgency)
        self._wake = threading.Condition()
        self._busy_since: float | None = None
        self._closing_at: float | None = None
        self._tended = False
        self._thread = threading.Thread(target=self._run, name=f"kvasir-tier-{name}", daemon=True)
        self._thread.start()

    def add(self, urgency: Urgency, job: Job) -> bool:
        """Queue a job. Return False if too many wait, or the thread is closed."""
        with self._wake:
            queue = self._queues[urgency]
            if self._closing_at is not None or len(queue) >= MAX_WAITING:
                return False
            queue.append(job)
            self._wake.notify()
            return True

    def stuck(self, seconds: float) -> bool:
        """Return whether a call has lasted longer than `seconds`."""
        since = self._busy_since
        return since is not None and self._now() - since > seconds

    @property
    def tended(self) -> bool:
        """Whether the last completed `maintain` had no more work."""
        return self._tended

    def close(self, drain_s: float) -> bool:
        """Run waiting jobs for at most `drain_s`, then end the thread. Return False if a call still hangs;
        its thread is left running. Idempotent."""
        with self._wake:
            self._closing_at = self._now() + drain_s
            self._wake.notify()
        self._thread.join(drain_s + TEND_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._busy_since = self._now()
            try:
                job()
            except Exception:  # noqa: BLE001 - a lane that ends would take its tier away without a word
                _log.exception("tier %s: a job failed", self._name)
            self._busy_since = None

    def _next(self) -> Job | None:
        with self._wake:
            while True:
                if self._closing_at is not None and self._now() >= self._closing_at:
                    return None
                job = next((queue.popleft() for queue in self._queues if queue), None)
                if job is not None:
                    return job
                if self._closing_at is not None:
                    return None
                if not self._tended or not self._wake.wait(TEND_S):
                    return self._tend_once

    def _tend_once(self) -> None:
        more = False
        try:
            more = self._tend()
        finally:
            self._tended = not more
