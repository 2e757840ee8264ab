"""Measured throughput of admission, from which wait estimates and `Retry-After` are computed.

The rate counts the cost started per second while requests waited, so idle time is not measured. It is unknown
until the first such interval, and again `FORGET_S` after the last one: a rate from workers that hung must not
refuse requests once they are healthy and idle.
"""

from __future__ import annotations

import math

WINDOW_S = 0.5
"""Shorter measurements are not added to the mean, and those below a fifth of it are dropped."""
MEMORY_S = 2.0
"""Time constant of the mean: older measurements weigh exponentially less."""
FORGET_S = 5 * MEMORY_S
"""Age at which a measurement is discarded."""
SERVICE_WEIGHT = 0.05


class Pace:
    """Throughput, in tokens of cost per second, and the time to first token of started requests."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._resized = 1.0
        """Number of places relative to the last measurement."""
        self._measured_s = 0.0
        self._since_s: float | None = None
        self._cost = 0
        self.service_s = 0.0
        """Typical time from start to first token, in seconds."""

    def waited(self, now: float) -> None:
        """A request waits; starts a measurement unless one is running."""
        if self._since_s is None:
            self._since_s, self._cost = now, 0
            if now - self._measured_s > FORGET_S:
                self._rate = None

    def began(self, cost: int, now: float) -> None:
        """A request starts; its cost counts if requests wait."""
        if self._since_s is None:
            return
        self._cost += cost
        if now - self._since_s >= WINDOW_S:
            self._fold(now)

    def queue_empty(self, now: float) -> None:
        """The queue is empty; ends the measurement."""
        if self._since_s is not None:
            if now - self._since_s >= WINDOW_S / 5:
                self._fold(now)
            self._since_s = None

    def resized(self, factor: float) -> None:
        """The number of places changed by `factor`. Until it is measured, a smaller fleet is taken to be as
        fast as before, and a larger one as proportionally faster, so that no request is refused for a guess.
        """
        self._resized *= factor

    def first_token(self, seconds: float) -> None:
        """Add a time from start to first token."""
        weight = SERVICE_WEIGHT if self.service_s else 1.0
        self.service_s += weight * (seconds - self.service_s)

    def rate(self, now: float) -> float | None:
        """Return the rate in tokens per second, or None if it is unknown."""
        if self._since_s is None:
            return None if now - self._measured_s > FORGET_S else self._expected()
        elapsed = now - self._since_s
        if elapsed >= WINDOW_S:
            self._fold(now)
        elif self._rate is None and elapsed >= WINDOW_S / 5 and self._cost:
            return self._cost / elapsed
        return self._expected()

    def wait_s(self, cost: float, now: float) -> float | None:
        """Return the time to start `cost` tokens, in seconds, or None if the rate is unknown."""
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
