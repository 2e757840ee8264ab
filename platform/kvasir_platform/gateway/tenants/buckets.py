"""The arithmetic of rate limits: a bucket is one number, the time at which it will be full again.

That is GCRA, the generic cell rate algorithm, with a tolerance of one minute. Nothing has to be counted down
as time passes, so a tenant that is idle costs nothing, and an empty bucket refuses without being changed.
"""

from __future__ import annotations

from kvasir.ports.limits import WINDOW_S

SLACK_S = 1e-6
"""What adding up floating-point times may be wrong by: a client that waits as told must get in."""
_OWED_S = 2 * WINDOW_S


def charged(full_s: float, now: float, amount: float, per_min: int) -> float:
    """When a bucket that would be full at `full_s` will be full after `amount` is taken from it, or
    (negative) put back."""
    return max(full_s, now) + amount * WINDOW_S / per_min


def bounded(full_s: float, now: float) -> float:
    """The same bucket, owing no more than a minute's worth beyond being empty."""
    return min(full_s, now + _OWED_S)


def wait(full_s: float, now: float) -> float:
    """How long until a bucket with this state, the amount already taken, would not be below empty; 0 when it
    is not."""
    left = full_s - now - WINDOW_S
    return left if left > SLACK_S else 0.0


def remaining(level_s: float, per_min: int) -> int:
    """What is in a bucket that needs `level_s` seconds to be full."""
    return max(0, min(per_min, int(per_min * (1 - level_s / WINDOW_S) + SLACK_S)))
