"""How fast requests get on, as measured: what waits of clients and `Retry-After` are told from.

The rate is what was begun per second while others waited, so that idle times do not count. Nothing is known
until there was such a time, nor for long after it: a rate from when workers hung must not turn away those who
come when they are well again and idle.
"""

from __future__ import annotations

import math

WINDOW_S = 0.5
"""Measurements shorter than this are not taken into the mean, and those below a fifth of it not at all."""
MEMORY_S = 2.0
"""The mean's: older measurements weigh exponentially less."""
FORGET_S = 5 * MEMORY_S
"""What was measured longer ago says nothing any more."""
SERVICE_WEIGHT = 0.05


class Pace:
    """Throughput in tokens of cost per second, and the time to first token of requests that have begun."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._resized = 1.0
        """How many times the places of the last measurement there are."""
        self._measured_s = 0.0
        self._since_s: float | None = None
        self._cost = 0
        self.service_s = 0.0
        """From start to first token, typically."""

    def waited(self, now: float) -> None:
        """Somebody waits from here on, if nobody did."""
        if self._since_s is None:
            self._since_s, self._cost = now, 0
            if now - self._measured_s > FORGET_S:
                self._rate = None

    def began(self, cost: int, now: float) -> None:
        """A request begins; it counts while somebody waits."""
        if self._since_s is None:
            return
        self._cost += cost
        if now - self._since_s >= WINDOW_S:
            self._fold(now)

    def nobody_waits(self, now: float) -> None:
        """The queue is empty."""
        if self._since_s is not None:
            if now - self._since_s >= WINDOW_S / 5:
                self._fold(now)
            self._since_s = None

    def resized(self, factor: float) -> None:
        """There are so many times the places of before. Nobody is turned away for those that went or came
        until they have been measured: fewer count as before, and more as more."""
        self._resized *= factor

    def first_token(self, seconds: float) -> None:
        """A request gave its first token so long after its start."""
        weight = SERVICE_WEIGHT if self.service_s else 1.0
        self.service_s += weight * (seconds - self.service_s)

    def rate(self, now: float) -> float | None:
        """Tokens a second; None where nothing is known."""
        if self._since_s is None:
            return None if now - self._measured_s > FORGET_S else self._expected()
        elapsed = now - self._since_s
        if elapsed >= WINDOW_S:
            self._fold(now)
        elif self._rate is None and elapsed >= WINDOW_S / 5 and self._cost:
            return self._cost / elapsed
        return self._expected()

    def wait_s(self, cost: float, now: float) -> float | None:
        """How long so much takes; None where nothing is known."""
        rate = self.rate(now)
        return None if not rate else cost / rate

    def _expected(self) -> float | None:
        return None if self._rate is None else self._rate * max(1.0, self._resized)

    def _fold(self, now: float) -> None:
        elapsed = now - (self._since_s or 0.0)
        measured = self._cost / elapsed
        if self._rate is None:
            self._rate = measured if self._cost else None
        else:
            age = now - self._measured_s
            before = self._rate * self._resized
            self._rate = before + (1.0 - math.exp(-age / MEMORY_S)) * (measured - before)
        self._resized = 1.0
        self._since_s, self._cost, self._measured_s = now, 0, now
