"""The link to a source of weights, as slow as a network: a local disk is too fast for the cost of a second
read to show."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class SlowLink:
    """Carries `rate` bytes per second for all readers together, and counts the bytes. `now` reads a clock in
    seconds, and `pause` waits so many."""

    def __init__(
        self,
        rate: float,
        *,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._now = now
        self._pause = pause
        self._free_at = 0.0
        self._carried = 0
        self._lock = Lock()

    @property
    def carried(self) -> int:
        """The bytes so far."""
        return self._carried

    def carry(self, count: int) -> None:
        """Block until the link has carried `count` more bytes, after those that others wait for."""
        with self._lock:
            self._carried += count
            now = self._now()
            self._free_at = max(self._free_at, now) + count / self._rate
            left = self._free_at - now
        self._pause(left)
