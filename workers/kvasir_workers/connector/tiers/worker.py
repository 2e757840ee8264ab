"""The tier half of the connector in the worker: copies blocks of one rank between the device and the arena.

Copies cannot fail: the slots of a load were verified and pinned before it was ordered, and a store has its
slots exclusively.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir_workers.connector.tiers.orders import ArenaParts, StoreOrder, TierOrders, TierReport
from kvasir_workers.tiers.copier import BlockCopier

NAP_S = 0.0002
NAPS = 10


class TierWorker:
    """Copies of one rank. `open_copier` makes the copier once the arena is known; `pause` sleeps."""

    def __init__(
        self, open_copier: Callable[[ArenaParts], BlockCopier], *, pause: Callable[[float], None]
    ) -> None:
        self._open_copier = open_copier
        self._pause = pause
        self._copier: BlockCopier | None = None
        self._stores: dict[int, int] = {}
        self._loads: dict[int, str] = {}
        self._report = TierReport()

    def before_forward(self, orders: TierOrders) -> None:
        """Save what the forward pass may overwrite, and make it wait for running saves."""
        if orders.arena is not None:
            self._copier = self._open_copier(orders.arena)
        if self._copier is None:
            return
        self._store(orders.early)
        self._copier.fence()

    def load(self, orders: TierOrders) -> None:
        """Start this step's loads."""
        if self._copier is not None:
            for order in orders.loads:
                self._loads[self._copier.load(order.slots, order.blocks)] = order.request_id

    def after_forward(self, orders: TierOrders) -> None:
        """Save what the forward pass has filled."""
        self._store(orders.late)

    def poll(self, idle: bool) -> set[str]:
        """Return requests whose loads have ended. An idle step sleeps here while a load runs."""
        loaded = self._take_ended()
        for _ in range(NAPS if idle and self._loads and not loaded else 0):
            self._pause(NAP_S)
            if loaded := self._take_ended():
                break
        return loaded

    def take_report(self) -> TierReport:
        """Return what ended since the last call."""
        report, self._report = self._report, TierReport()
        return report

    def _store(self, orders: tuple[StoreOrder, ...]) -> None:
        if self._copier is not None:
            for order in orders:
                self._stores[self._copier.store(order.blocks, order.slots)] = order.batch

    def _take_ended(self) -> set[str]:
        loaded: set[str] = set()
        for ticket, seconds in [] if self._copier is None else self._copier.poll():
            if ticket in self._stores:
                self._report.stored[self._stores.pop(ticket)] = 1
            else:
                request_id = self._loads.pop(ticket)
                self._report.loaded[request_id] = seconds
                loaded.add(request_id)
        return loaded
