"""The messages between the tier halves of the connector, once per engine step.

As in connector/orders.py, the scheduler half decides, the worker half of every rank copies, and these values
pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvasir_workers.tiers.memory import SharedName


@dataclass(frozen=True, slots=True)
class ArenaParts:
    """Where ranks keep their parts of `slots` slots. `shared` is the memory of all parts, in which the part
    of each rank begins at its byte of `offsets`; ranks are ordered by stage, and within a stage by
    tensor-parallel rank. None if the ranks are on several nodes: each keeps its part in memory of its own."""

    slots: int
    offsets: tuple[int, ...]
    shared: SharedName | None


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy `blocks` of the device into `slots`; `batch` is the scheduler half's id of the store."""

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
    """Orders from the scheduler half to the worker half. `early` stores run before the step's forward pass,
    which may overwrite these blocks; `late` ones after it, which fills them. `arena` is sent once, with the
    first orders."""

    arena: ArenaParts | None = None
    early: tuple[StoreOrder, ...] = ()
    late: tuple[StoreOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()


@dataclass(slots=True)
class TierReport:
    """Report from the worker half to the scheduler half: ranks that have ended each store, by batch, and
    seconds of each load on the slowest rank, by request."""

    stored: dict[int, int] = field(default_factory=dict)
    loaded: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.loaded)

    def merge(self, other: TierReport) -> None:
        """Merge another rank's report."""
        for batch, ranks in other.stored.items():
            self.stored[batch] = self.stored.get(batch, 0) + ranks
        for request_id, seconds in other.loaded.items():
            self.loaded[request_id] = max(seconds, self.loaded.get(request_id, 0.0))
