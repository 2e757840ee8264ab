"""The arithmetic of rate limits: a bucket is one number, the time at which it will be full again.

That is GCRA, the generic cell rate algorithm, with a tolerance of one minute. Nothing has to be counted down
as time passes, so a tenant that is idle costs nothing, and an empty bucket refuses without being changed.
"""

from __future__ import annotations

from kvasir.ports.limits import WINDOW_S

SLACK_S = 1e-6
"""Tolerance of floating-point sums: a client that waits as long as told must be admitted."""
_OWED_S = 2 * WINDOW_S


def charged(full_s: float, now: float, amount: float, per_min: int) -> float:
    """Return when a bucket that is full at `full_s` will be full after `amount` is taken from it, or put back
    if negative."""
    return max(full_s, now) + amount * WINDOW_S / per_min


def bounded(full_s: float, now: float) -> float:
    """Return the bucket with a debt of at most one minute beyond empty."""
    return min(full_s, now + _OWED_S)


def wait(full_s: float, now: float) -> float:
    """Return the time until a bucket with this state, after the amount was taken, is not below empty; 0 if it
    is not."""
    left = full_s - now - WINDOW_S
    return left if left > SLACK_S else 0.0


def remaining(level_s: float, per_min: int) -> int:
    """Return the content of a bucket that needs `level_s` seconds to be full."""
    return max(0, min(per_min, int(per_min * (1 - level_s / WINDOW_S) + SLACK_S)))
