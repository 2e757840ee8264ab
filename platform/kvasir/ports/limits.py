"""Rate limits of tenants, counted by one router in memory or by several in a shared store.

Results are delivered by callback, at once or in a later turn of the event loop, because the edge uses
callbacks and a router that counts in memory must not create a task per request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

WINDOW_S = 60.0

LENT_S = 15.0
"""Seconds for which requests of somebody who is not heard of count as running."""

Limit = Literal["requests", "tokens", "concurrency", "budget"]
PerMinute = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a tenant; None means no limit. `budget`: its costs are bounded.

    Requests and tokens are token buckets with a capacity of one minute's amount and a constant refill rate:
    in any span of `s` seconds, at most `per_min × (1 + s / 60)` are granted.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrency: int | None = None
    budget: bool = False

    @property
    def unlimited(self) -> bool:
        """Whether no limit is set."""
        return self.uncounted and not self.budget

    @property
    def uncounted(self) -> bool:
        """Whether no limit is set for which requests are counted."""
        return self.requests_per_min is None and self.tokens_per_min is None and self.concurrency is None


class BucketLevels(NamedTuple):
    """Seconds until the buckets are full again: 60 is empty, more is debt."""

    requests_s: float = 0.0
    tokens_s: float = 0.0


class Grant(NamedTuple):
    """Permission to run one request. `tokens` were charged, in the shared store if `shared`. `levels` are
    those after the charge. `budget` describes a budget that is nearly spent, "" otherwise."""

    tenant: str
    quota: Quota
    tokens: int
    levels: BucketLevels
    shared: bool = False
    budget: str = ""


class LimitRefusal(NamedTuple):
    """A refusal; nothing is charged. `limit` is the limit with the longest wait. After `retry_after_s`
    seconds the same request is granted, unless others use the capacity first; for concurrency it is an
    estimate. `budget` describes a budget that is spent, "" otherwise."""

    limit: Limit
    retry_after_s: float
    levels: BucketLevels
    budget: str = ""


class RateLimits(Protocol):
    """Obligations: a quota is charged completely or not at all; the caller ends each grant by exactly one of
    `settle` and `release`; tenants do not affect each other. If the store is unreachable, the router decides
    from its own counters and reports that it does. All calls come from one event loop.
    """

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """Request a grant for `tokens` tokens; `then` is called exactly once. Raises ValueError for more
        tokens than the quota per minute, which can never be granted."""
        ...

    def settle(self, grant: Grant, tokens: int) -> None:
        """End the grant of a request that used `tokens`. Unused tokens are returned; excess tokens become
        debt, up to one minute's amount."""
        ...

    def release(self, grant: Grant) -> None:
        """End the grant of a request that did not run. The whole charge is returned."""
        ...

    async def run(self) -> None:
        """Run background work until cancelled."""
        ...


@runtime_checkable
class SharedRateLimits(RateLimits, Protocol):
    """Limits that several routers share. `shared`: whether the shared store is in use at this moment;
    `local_decisions`: requests that were granted or refused from local counters."""

    @property
    def shared(self) -> bool: ...

    @property
    def local_decisions(self) -> int: ...


@runtime_checkable
class LendingRateLimits(SharedRateLimits, Protocol):
    """Shared limits of which others, that do not reach the store, may use a part. `then` is not called while
    the store is unreachable."""

    def allot(
        self,
        tenant: str,
        limit: PerMinute,
        per_min: int,
        *,
        wanted: float,
        returned: float,
        then: Callable[[float], None],
    ) -> None:
        """Return `returned` to the bucket of a limit of `per_min`, then take as much of `wanted` as it has;
        `then` gets the amount."""
        ...

    def lend(
        self, tenant: str, most: int, borrower: str, *, wanted: int, running: int, then: Callable[[int], None]
    ) -> None:
        """Let a borrower, which runs `running` requests, have up to `wanted` of a tenant's `most` requests at
        a time; `then` gets how many. None of what it has is taken from it, and it counts as running until
        the borrower asks for less, or has not asked for `LENT_S`."""
        ...
