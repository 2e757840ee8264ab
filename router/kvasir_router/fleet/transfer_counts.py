"""Counts the KV that workers received over each class of link."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.core.locality import LinkClass, link_class
from kvasir.core.requests import Timings, Usage
from kvasir.ports.router import LinkTransfers
from kvasir.ports.routing import RoutingTarget
from kvasir_router.fleet.work import Worker


class TransferCounts:
    """Transfers between `workers`, which stay counted when their workers leave."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._over: dict[LinkClass, LinkTransfers] = {}

    def count(
        self, source: RoutingTarget | None, receiver: Worker, usage: Usage, timings: Timings
    ) -> LinkClass:
        """Count what a leg received, if anything, and return the class of the link: UNKNOWN for a `source`
        that is unknown or has left."""
        sender = None if source is None else self._workers.get(source.worker_id)
        if sender is None or not usage.transferred_bytes:
            link = LinkClass.UNKNOWN
        else:
            link = link_class(sender.identity.locality, receiver.identity.locality)
        if usage.transferred_bytes:
            before = self._over.get(link, LinkTransfers())
            self._over[link] = before.plus(usage.transferred_bytes, timings.transfer_s)
        return link

    def totals(self) -> dict[LinkClass, LinkTransfers]:
        """Return the counts of each class over which anything was received."""
        return dict(self._over)
