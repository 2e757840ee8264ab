"""A circuit breaker: after a failure a service is not called for a while, and is retried off any request's
path.

A server that hangs costs every caller a full deadline. After one timeout, or a few failures in a row, the
breaker opens and calls stop; after a pause a single trial, made outside requests, closes it again. Pure: time
and randomness are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.ports.clock import Rng


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """`failures` in a row open it. The first pause is `backoff_s`, and each further one is twice as long, up
    to `backoff_max_s`. Each is lengthened by up to the fraction `jitter`, so that workers do not retry
    together."""

    failures: int = 3
    backoff_s: float = 0.25
    backoff_max_s: float = 30.0
    jitter: float = 0.2


class Breaker:
    """Closed: in use. Open: not used until a pause has passed; then one trial is due at a time.

    A breaker that opens soon after it closed pauses longer than before: a service that answers a trial may
    still fail under load.
    """

    def __init__(self, rng: Rng, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._rng = rng
        self._failures = 0
        self._pause = 0.0
        self._closed_at: float | None = None
        self._trial_at: float | None = None
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether the service is used."""
        return self._trial_at is None

    def due(self, now: float) -> bool:
        """Return whether to make a trial. True gives the trial to this caller only, for as long as the last
        pause: a caller that never reports its result does not block further trials."""
        if self._trial_at is None or now < self._trial_at:
            return False
        self._trial_at = now + self._pause
        self._trying = True
        return True

    def failed(self, now: float, *, at_once: bool = False) -> bool:
        """Record a failed call or trial; `at_once` opens the breaker on the first failure, as for a timeout.
        Return whether this opened it."""
        if self._trial_at is not None:
            if self._trying:
                self._open(now)
            return False
        self._failures += 1
        if not at_once and self._failures < self._limits.failures:
            return False
        if self._closed_at is not None and now - self._closed_at > self._pause:
            self._pause = 0.0
        self._open(now)
        return True

    def succeeded(self, now: float) -> bool:
        """Record a successful call or trial. Return whether this closed it."""
        self._failures = 0
        self._trying = False
        if self._trial_at is None:
            return False
        self._trial_at = None
        self._closed_at = now
        return True

    def _open(self, now: float) -> None:
        limits = self._limits
        self._pause = min(max(limits.backoff_s, self._pause * 2), limits.backoff_max_s)
        self._trial_at = now + self._pause * (1.0 + limits.jitter * self._rng.random())
        self._trying = False
        self._failures = 0
