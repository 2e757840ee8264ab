"""Limits of all cells where the routers of a cell share limits in a store."""

from __future__ import annotations

from kvasir.ports.limits import LendingRateLimits, RateLimits


class SharedCellLimits:
    """`SharedRateLimits` of all cells, over a `store` that routers of this one share."""

    def __init__(self, cells: RateLimits, store: LendingRateLimits) -> None:
        self._store = store
        self.take, self.settle, self.release = cells.take, cells.settle, cells.release
        self.run = store.run

    @property
    def shared(self) -> bool:
        """See SharedRateLimits."""
        return self._store.shared

    @property
    def local_decisions(self) -> int:
        """See SharedRateLimits."""
        return self._store.local_decisions
