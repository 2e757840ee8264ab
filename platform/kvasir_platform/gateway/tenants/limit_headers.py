"""Rate limit headers as OpenAI's clients read them: limit per minute, remaining, and time until reset."""

from __future__ import annotations

import math

from kvasir.ports.limits import BucketLevels, Quota
from kvasir_platform.gateway.tenants.buckets import remaining


def limit_headers(quota: Quota, levels: BucketLevels, budget: str = "") -> bytes:
    """Return the header lines of a response; none for what is not limited, and for a budget that is far from
    spent."""
    lines = b"x-kvasir-budget: %b\r\n" % budget.encode("ascii", "replace") if budget else b""
    if quota.requests_per_min is not None:
        lines += _lines(b"requests", quota.requests_per_min, levels.requests_s)
    if quota.tokens_per_min is not None:
        lines += _lines(b"tokens", quota.tokens_per_min, levels.tokens_s)
    return lines


def _lines(what: bytes, per_min: int, level_s: float) -> bytes:
    return b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n" % (
        what,
        per_min,
        what,
        remaining(level_s, per_min),
        what,
        _duration(level_s),
    )


def _duration(seconds: float) -> bytes:
    """Format a duration as OpenAI does: 120ms, 6.5s, 1m0s."""
    ms = math.ceil(seconds * 1e3)
    if ms < 1000:
        return b"%dms" % ms
    minutes, ms = divmod(ms, 60_000)
    rest = b"%gs" % (ms / 1e3)
    return b"%dm%b" % (minutes, rest) if minutes else rest
