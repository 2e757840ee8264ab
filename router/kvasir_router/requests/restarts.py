"""How often a request may start again, so that a fault does not become a storm of retries.

Starts after the loss of a worker are bounded by the number of workers that can be lost, and so are those of a
stream that its client has begun to read; all others draw on a budget that arrivals fill: a request that fails
everywhere is restarted everywhere, so that failing workers would get more work the worse they are.
"""

from __future__ import annotations

from typing import Protocol

from kvasir.core.errors import KvasirError, RequestError
from kvasir_router.fleet.health import FleetHealth
from kvasir_router.requests.state import MachineLimits

ENGINE_DEAD = "engine_dead"
"""The last error of a worker whose engine died, for every leg that ran there."""
TRANSFER_FAILED = "transfer_failed"
FREE = frozenset({"worker_draining", "session_lost"})
"""Refusals of workers that did nothing for the request. Their number is bounded by the workers that leave."""
BLAMELESS = FREE | {TRANSFER_FAILED}
"""Failures that say nothing of the worker that reports them: KV that did not arrive was at another worker."""
DEPTH = 20.0
"""Largest balance of a retry budget, so that a long time without faults does not pay for a storm."""


class Restartable(Protocol):
    """A request that counts its starts after the first: `retries` after failures, `migrations` after the loss
    of a worker. It avoids the workers on which it failed."""

    retries: int
    migrations: int
    avoid: set[str]
    last_error: KvasirError | None


class RetryBudget:
    """Restarts that arrivals pay for: an arrival deposits a fraction of a restart, a restart withdraws one.

    Obligation: at any time, granted withdrawals <= `ratio` * deposits + `reserve`. The `reserve` lets a
    router with little traffic discover a failing worker without failing a request."""

    def __init__(self, ratio: float, reserve: int = 10) -> None:
        self._ratio = ratio
        self._balance = float(reserve)
        self._depth = max(DEPTH, self._balance)

    def deposit(self) -> None:
        """A request arrived."""
        self._balance = min(self._depth, self._balance + self._ratio)

    def withdraw(self) -> bool:
        """Withdraw one restart. Return whether the balance allowed it."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


class RetryAccounting:
    """Decides whether a request may run again, and reports failures to the health of workers. `budget` bounds
    starts after failures by the number of requests that arrive."""

    def __init__(self, limits: MachineLimits, health: FleetHealth) -> None:
        self._limits = limits
        self._health = health
        self.budget = RetryBudget(limits.retry_budget)

    def refusal(
        self,
        state: Restartable,
        error: KvasirError,
        worker_id: str,
        now: float,
        *,
        lost: bool,
        begun: bool = False,
        final: KvasirError | None = None,
    ) -> KvasirError | None:
        """Return the error that ends a request whose leg on `worker_id` ended with `error`, or None if it may
        start again without that worker, which is counted. `lost`: the worker is gone; `begun`: the client has
        part of the output; `final`: the error if the output cannot be continued exactly."""
        lost = lost or error.code == ENGINE_DEAD
        state.last_error = error
        if not lost and not isinstance(error, RequestError) and error.code not in BLAMELESS:
            self._health.failed(worker_id, error.code, now)
        if isinstance(error, RequestError):
            return error
        if final is not None:
            return final
        if not self._counted(state, error, moved=lost or begun):
            return error
        state.avoid.add(worker_id)
        return None

    def _counted(self, state: Restartable, error: KvasirError, *, moved: bool) -> bool:
        if moved:
            if state.migrations >= self._limits.max_migrations:
                return False
            state.migrations += 1
            return True
        if state.retries >= self._limits.max_retries or not (error.code in FREE or self.budget.withdraw()):
            return False
        state.retries += 1
        return True
