"""Bounds restarts by the number of requests that arrive.

A request that fails everywhere is restarted everywhere: without a bound, failing workers get more work the
worse they are. Each arrival therefore deposits a fraction of a restart, and each restart withdraws a whole
one.
"""

from __future__ import annotations

DEPTH = 20.0
"""Largest balance, so that a long time without faults does not pay for a storm."""


class RetryBudget:
    """Obligation: at any time, granted withdrawals <= `ratio` * deposits + `reserve`. The `reserve` lets a
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
