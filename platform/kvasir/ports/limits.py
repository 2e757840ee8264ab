"""How much a tenant may use: counted by one router in memory, or by several in a store that they share.

Answers come by call, at once or from a later turn of the event loop, because the handlers of the edge are
calls too, and a router that counts in its own memory must not pay for a task on every request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

WINDOW_S = 60.0

Limit = Literal["requests", "tokens", "concurrency"]


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use; None is not limited.

    Requests and tokens are buckets that hold a minute's worth and fill evenly: in any span of `s` seconds at
    most `per_min × (1 + s / 60)` of them are let in.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrency: int | None = None

    @property
    def unlimited(self) -> bool:
        """Whether there is nothing to count."""
        return self.requests_per_min is None and self.tokens_per_min is None and self.concurrency is None


class BucketLevels(NamedTuple):
    """How long the buckets take to be full again, in seconds: 60 is empty, more is owed."""

    requests_s: float = 0.0
    tokens_s: float = 0.0


class Grant(NamedTuple):
    """Leave to run one request. `tokens` have been charged, by all routers together where `shared`. `levels`
    are those after it."""

    tenant: str
    quota: Quota
    tokens: int
    levels: BucketLevels
    shared: bool = False


class LimitRefusal(NamedTuple):
    """No leave, and nothing charged. `limit` is what was in the way for longest. After `retry_after_s`
    seconds the same is granted, if nobody else takes it before; for concurrency that is a guess."""

    limit: Limit
    retry_after_s: float
    levels: BucketLevels


class RateLimits(Protocol):
    """Obligations: of a quota either all is charged or nothing; each grant is to be ended by exactly one of
    `settle` and `release`; one tenant's use never touches another's. A store that cannot be reached refuses
    nobody: the router goes by what it has counted itself, and says so. All calls come from one event loop.
    """

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """Ask leave for a request that may use so many tokens; `then` is called exactly once. Raises
        ValueError for more tokens than the quota has in a minute, for which no waiting helps."""
        ...

    def settle(self, grant: Grant, tokens: int) -> None:
        """The request has ended and has used so many: the rest of what was charged is given back, and what
        was used beyond it is owed, up to a minute's worth."""
        ...

    def release(self, grant: Grant) -> None:
        """The request has not run: everything is given back."""
        ...

    async def run(self) -> None:
        """What there is to do beside the calls, until it is cancelled."""
        ...


@runtime_checkable
class SharedRateLimits(RateLimits, Protocol):
    """Limits that several routers count together. `shared`: they do at this moment; `local_decisions`: how
    many requests were let in or refused without the others."""

    @property
    def shared(self) -> bool: ...

    @property
    def local_decisions(self) -> int: ...
