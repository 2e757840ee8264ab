"""Rate limits as OpenAI's clients read them: what there is a minute, what is left, and when it is all
back."""

from __future__ import annotations

import math

from kvasir.ports.limits import BucketLevels, Quota
from kvasir_platform.gateway.tenants.buckets import remaining


def limit_headers(quota: Quota, levels: BucketLevels) -> bytes:
    """The header lines of an answer; none for what is not limited."""
    lines = b""
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
    """As OpenAI writes it: 120ms, 6.5s, 1m0s."""
    ms = math.ceil(seconds * 1e3)
    if ms < 1000:
        return b"%dms" % ms
    minutes, ms = divmod(ms, 60_000)
    rest = b"%gs" % (ms / 1e3)
    return b"%dm%b" % (minutes, rest) if minutes else rest
