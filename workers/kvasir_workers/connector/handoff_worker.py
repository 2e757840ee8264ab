"""The connector's half beside the model: carries out the scheduler half's orders on one rank.

Called from the engine's step loop, one rank per process. It never raises into a step: an exception there
ends the engine, so whatever goes wrong with a transfer becomes a failed pull, which the engine recomputes
or refuses as configured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import KvTransfer, LeaseEnded, Offer, Pulled, PullFailed
from kvasir_workers.connector.orders import OfferOrder, PullOrder, Received, StepReport
from kvasir_workers.transfer.ticket import decode

_log = logging.getLogger(__name__)

PULL_NAP_S = 0.0002
PULL_NAPS = 10
LEASE_NAP_S = 0.001
MAX_EARLY_RELEASES = 1024


class HandoffWorker:
    """Offers and pulls of one rank. `pause` sleeps; `rank` of `ranks` is the tensor-parallel one."""

    def __init__(
        self, transfer: KvTransfer, *, rank: int, ranks: int, timeout_s: float, pause: Callable[[float], None]
    ) -> None:
        self._transfer = transfer
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._pause = pause
        self._leases: dict[str, str] = {}
        self._early_releases: OrderedDict[str, None] = OrderedDict()
        self._pulls: dict[str, PullOrder] = {}
        self._refused: list[PullFailed] = []
        self._sent: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = StepReport()

    def offer(self, orders: Iterable[OfferOrder]) -> None:
        """Publish leases; before the step's forward, since tickets may already be on their way."""
        for order in orders:
            if order.lease.lease_id in self._early_releases:
                del self._early_releases[order.lease.lease_id]
                self._sent.add(order.request_id)
                continue
            try:
                self._transfer.offer(order.lease.lease_id, order.lease.fence, order.blocks, order.lease.ttl_s)
                self._leases[order.lease.lease_id] = order.request_id
            except TransferError as error:
                _log.error("request %s: its KV cannot be offered: %s", order.request_id, error)
                self._sent.add(order.request_id)

    def pull(self, orders: Iterable[PullOrder]) -> None:
        """Begin pulls."""
        for order in orders:
            self._pulls[order.pull_id] = order
            try:
                offer, source = self._resolve(order)
                self._transfer.pull(order.pull_id, offer, source, order.targets, self._timeout_s)
            except TransferError as error:
                self._refused.append(PullFailed(order.pull_id, "layout", error.message))

    def release(self, lease_ids: Iterable[str]) -> None:
        """End leases that nobody will pull. One that is not offered yet ends when it is."""
        for lease_id in lease_ids:
            if lease_id in self._leases:
                self._transfer.release(lease_id)
                continue
            self._early_releases[lease_id] = None
            if len(self._early_releases) > MAX_EARLY_RELEASES:
                self._early_releases.popitem(last=False)

    def poll(self, idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose leases ended, and requests whose pulls ended, well or badly.

        An idle step naps here until something happens, a few milliseconds at most: the engine's loop
        would otherwise spin while a request waits or a lease is out."""
        events = self._refused + self._transfer.poll()
        self._refused = []
        if idle and not events:
            for nap_s in [PULL_NAP_S] * PULL_NAPS if self._pulls else [LEASE_NAP_S] if self._leases else []:
                self._pause(nap_s)
                events = self._transfer.poll()
                if events:
                    break
        received: set[str] = set()
        for event in events:
            if isinstance(event, LeaseEnded):
                self._end_lease(event)
            else:
                received |= self._end_pull(event)
        sent, self._sent = self._sent, set()
        return sent, received

    def take_bad_blocks(self) -> set[int]:
        """Targets of failed pulls since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> StepReport | None:
        """What was moved since the last call; None when nothing was."""
        if not self._report.received and not self._report.confirmed:
            return None
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """End everything."""
        self._transfer.close()

    def _resolve(self, order: PullOrder) -> tuple[Offer, tuple[int, ...]]:
        """This rank's part of the ticket. Raises TransferError."""
        handoff = order.handoff
        ticket = decode(handoff.ticket)
        if len(ticket.ranks) != self._ranks:
            raise TransferError(f"tensor_parallel_size: {self._ranks} != {len(ticket.ranks)}")
        source = ticket.blocks[order.first_block : order.first_block + len(order.targets)]
        if len(source) != len(order.targets):
            raise TransferError(f"{len(ticket.blocks)} blocks are offered, and more are missing here")
        offer = Offer(handoff.lease_id, handoff.fence, handoff.ttl_s, ticket.blocks, ticket.ranks[self._rank])
        return offer, source

    def _end_lease(self, event: LeaseEnded) -> None:
        request_id = self._leases.pop(event.lease_id, None)
        if request_id is not None:
            self._sent.add(request_id)
            if event.how == "expired":
                _log.warning("lease %s expired: its KV was offered and never pulled", event.lease_id)

    def _end_pull(self, event: Pulled | PullFailed) -> set[str]:
        order = self._pulls.pop(event.pull_id)
        if isinstance(event, PullFailed):
            _log.warning("pull %s failed: %s: %s", event.pull_id, event.reason, event.detail)
        if not order.parked:
            self._report.confirmed[event.pull_id] = 1
            return set()
        if isinstance(event, PullFailed):
            self._bad_blocks.update(order.targets)
            self._report.received[event.pull_id] = Received(0, 0.0, event.reason)
        else:
            self._report.received[event.pull_id] = Received(event.bytes_moved, event.seconds)
        return {event.pull_id}
