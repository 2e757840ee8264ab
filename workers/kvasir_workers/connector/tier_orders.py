"""What the tier halves of the connector say to each other, once per engine step.

As in orders.py: the scheduler half decides, the worker half of every rank copies, and these values pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvasir_workers.tiers.memory import SharedName


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy `blocks` of the device into `slots`; the scheduler half knows it as `batch`."""

    batch: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy `slots` into `blocks`, for which the request is parked."""

    request_id: str
    slots: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TierOrders:
    """Scheduler half to worker half. `early` comes before the step's forward, which may overwrite these
    blocks; `late` after it, which fills them. `memory` is what slots are in, said once, with the first."""

    memory: SharedName | None = None
    early: tuple[StoreOrder, ...] = ()
    late: tuple[StoreOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()


@dataclass(slots=True)
class TierReport:
    """Worker half to scheduler half: ranks that have ended each store, by batch, and how long each load took
    on the slowest rank, by request."""

    stored: dict[int, int] = field(default_factory=dict)
    loaded: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.loaded)

    def merge(self, other: TierReport) -> None:
        """Take another rank's report in."""
        for batch, ranks in other.stored.items():
            self.stored[batch] = self.stored.get(batch, 0) + ranks
        for request_id, seconds in other.loaded.items():
            self.loaded[request_id] = max(seconds, self.loaded.get(request_id, 0.0))
