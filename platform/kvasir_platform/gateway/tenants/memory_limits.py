"""Rate limits counted in memory by one router: a few numbers per tenant, and no waiting."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.ports.limits import BucketLevels, Grant, Limit, LimitRefusal, Quota
from kvasir_platform.gateway.tenants.buckets import bounded, charged, wait

LIMITS: tuple[Limit, ...] = ("requests", "tokens", "concurrency")
GUESS_S = 1.0
"""Estimated wait for a concurrency slot: the end of a running request is unknown."""


class _Tenant:
    """`requests` and `tokens` are the times at which the buckets are full again."""

    __slots__ = ("requests", "running", "tokens")

    def __init__(self) -> None:
        self.requests = 0.0
        self.tokens = 0.0
        self.running = 0


class MemoryLimits:
    """The port in memory. Holds three numbers for each tenant that has sent a request; tenants are those of
    the spec.

    `now` is monotonic, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tenants: dict[str, _Tenant] = {}

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """Decide immediately."""
        then(self.decide(tenant, quota, tokens))

    def decide(self, tenant: str, quota: Quota, tokens: int) -> Grant | LimitRefusal:
        """As `take`, which see."""
        check_amount(quota, tokens)
        now = self._now()
        state = self._state(tenant)
        requests, spent = self._charge(state, quota, tokens, now)
        busy = quota.concurrency is not None and state.running >= quota.concurrency
        waits = wait(requests, now), wait(spent, now), GUESS_S if busy else 0.0
        if (longest := max(waits)) > 0:
            limit = LIMITS[waits.index(longest)]
            return LimitRefusal(limit, longest, levels(state.requests, state.tokens, now))
        state.requests, state.tokens = requests, spent
        state.running += 1
        return Grant(tenant, quota, tokens, levels(requests, spent, now))

    def count(self, grant: Grant) -> None:
        """Count a grant that was made elsewhere, even beyond the limits."""
        state = self._state(grant.tenant)
        now = self._now()
        requests, spent = self._charge(state, grant.quota, grant.tokens, now)
        state.requests, state.tokens = bounded(requests, now), bounded(spent, now)
        state.running += 1

    def settle(self, grant: Grant, tokens: int) -> None:
        """See the port."""
        self._end(grant, 0, tokens - grant.tokens)

    def release(self, grant: Grant) -> None:
        """See the port."""
        self._end(grant, -1, -grant.tokens)

    def running(self, tenant: str) -> int:
        """Return the number of grants that have not ended."""
        state = self._tenants.get(tenant)
        return 0 if state is None else state.running

    def tenants(self) -> list[str]:
        """Return all tenants that have sent a request."""
        return list(self._tenants)

    async def run(self) -> None:
        """Return at once: there is no background work."""

    def _state(self, tenant: str) -> _Tenant:
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant()
        return state

    @staticmethod
    def _charge(state: _Tenant, quota: Quota, tokens: int, now: float) -> tuple[float, float]:
        requests, spent = state.requests, state.tokens
        if quota.requests_per_min is not None:
            requests = charged(requests, now, 1, quota.requests_per_min)
        if quota.tokens_per_min is not None:
            spent = charged(spent, now, tokens, quota.tokens_per_min)
        return requests, spent

    def _end(self, grant: Grant, requests: int, tokens: int) -> None:
        state, quota, now = self._state(grant.tenant), grant.quota, self._now()
        state.running -= 1
        if requests and quota.requests_per_min is not None:
            state.requests = charged(state.requests, now, requests, quota.requests_per_min)
        if tokens and quota.tokens_per_min is not None:
            state.tokens = bounded(charged(state.tokens, now, tokens, quota.tokens_per_min), now)


def levels(requests: float, tokens: float, now: float) -> BucketLevels:
    """The levels of buckets that will be full at these times."""
    return BucketLevels(max(0.0, requests - now), max(0.0, tokens - now))


def check_amount(quota: Quota, tokens: int) -> None:
    """Raise ValueError for an amount larger than the bucket."""
    if quota.tokens_per_min is not None and tokens > quota.tokens_per_min:
        raise ValueError(f"{tokens} tokens exceed the limit of {quota.tokens_per_min} a minute")
