"""How often a request may begin again: a fault must not become a storm of retries.

Starts after the loss of a worker are bounded by the workers that can be lost, and so are those of a stream
that its client has begun to read; all others draw on a budget that arrivals fill.
"""

from __future__ import annotations

from typing import Protocol

from kvasir.core.errors import KvasirError
from kvasir_router.requests.retry_budget import RetryBudget

FREE = frozenset({"worker_draining", "session_lost"})
"""Refusals of workers that did nothing for the request, and whose number their own going bounds."""


class Started(Protocol):
    """A request that counts its starts after the first: `retries` after failures, `migrations` to go on
    elsewhere."""

    retries: int
    migrations: int


class RetryAccounting:
    """`budget` bounds starts after failures by the number of requests that arrive."""

    def __init__(self, *, max_retries: int, max_migrations: int, budget_ratio: float) -> None:
        self._max_retries = max_retries
        self._max_migrations = max_migrations
        self.budget = RetryBudget(budget_ratio)

    def counted(self, started: Started, error: KvasirError, *, moved: bool) -> bool:
        """Whether one more start is within bounds, after `error`; it is counted then, as a migration if
        `moved`."""
        if moved:
            if started.migrations >= self._max_migrations:
                return False
            started.migrations += 1
            return True
        if started.retries >= self._max_retries or not (error.code in FREE or self.budget.withdraw()):
            return False
        started.retries += 1
        return True
