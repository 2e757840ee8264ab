"""How many new starts the requests that arrive can pay for.

A request that fails everywhere is started again everywhere: without a bound, workers that are in trouble get
the more work the worse they are. So each arrival pays in a fraction of a start, and each new start takes a
whole one out.
"""

from __future__ import annotations

DEPTH = 20.0
"""At most so many starts are saved up, so that a long good time does not pay for a storm."""


class RetryBudget:
    """Obligation: at any time, withdrawals granted <= `ratio` * deposits + `reserve`. The `reserve` lets a
    router that has seen few requests find out about a failing worker at no client's expense."""

    def __init__(self, ratio: float, reserve: int = 10) -> None:
        self._ratio = ratio
        self._balance = float(reserve)
        self._depth = max(DEPTH, self._balance)

    def deposit(self) -> None:
        """A request has arrived."""
        self._balance = min(self._depth, self._balance + self._ratio)

    def withdraw(self) -> bool:
        """Whether a request may be started once more; if so, that is paid for."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
