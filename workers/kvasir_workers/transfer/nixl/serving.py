"""The sender side: leases, which end by notifications, a release or their deadline.

A lease's page is updated as soon as the checksums of further blocks are known, on the thread that computes
them: receivers wait for it, and the step loop may be busy with a forward pass for seconds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import msgspec

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import BlockPart, LeaseEnded, Offer
from kvasir_workers.transfer.common.checksums import BlockSums, PendingSums
from kvasir_workers.transfer.common.lease_keys import Refusals, lease_key, mac, same
from kvasir_workers.transfer.common.leases import LiveLeases, TransferLease
from kvasir_workers.transfer.nixl.agent import NixlAgent
from kvasir_workers.transfer.nixl.leases import Extent, NixlLeaseTable
from kvasir_workers.transfer.nixl.pages import MAX_PAGE_BYTES, PageMemory, PageWriter, page_bytes

_log = logging.getLogger(__name__)

MAX_NOTIFICATION_BYTES = 1024
MAX_READERS = 1024


class PulledNotice(msgspec.Struct, frozen=True, array_like=True):
    """A receiver's notification that it holds every block it pulled: part number `part` of `of`. `proof`
    shows that it has the ticket."""

    lease_id: str
    fence: int
    part: int
    of: int
    proof: bytes

    @classmethod
    def signed(cls, offer: Offer, reader: BlockPart, key: bytes) -> PulledNotice:
        """Return the notice of a reader that has the key of the offer's lease."""
        return cls(offer.lease_id, offer.fence, reader.index, reader.of, _proof(key, reader.index, reader.of))

    def proves(self, secret: bytes) -> bool:
        """Return whether its writer has the lease's key, which follows from the agent's secret."""
        key = lease_key(secret, self.lease_id, self.fence)
        return same(self.proof, _proof(key, self.part, self.of))


@dataclass(slots=True)
class _Lease(TransferLease):
    """`unpublished` are blocks that are not in the page yet. `page` is None if the lease has none."""

    blocks: int = 0
    extent: Extent | None = None
    page: PageWriter | None = None
    granted: bool = False
    unpublished: deque[tuple[tuple[int, ...], PendingSums]] = field(default_factory=deque)


class NixlSender:
    """Leases on local blocks, published in a table and in pages that receivers read. `parts` is the number of
    checksums per block, 0 for none. A notice ends a lease only if it proves to have a ticket of `secret`."""

    def __init__(
        self,
        agent: NixlAgent,
        table: NixlLeaseTable,
        pages: PageMemory,
        sums: BlockSums,
        parts: int,
        *,
        secret: bytes,
        refusals: Refusals,
    ) -> None:
        self._agent = agent
        self._secret = secret
        self._refusals = refusals
        self._table = table
        self._pages = pages
        self._sums = sums
        self._parts = parts
        self._leases: LiveLeases[_Lease] = LiveLeases(self._withdraw)
        self._pages_lock = Lock()

    @property
    def live(self) -> int:
        """Number of live leases."""
        return len(self._leases)

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], *, total: int, ttl_s: float, now: float
    ) -> None:
        """Publish a lease on `total` blocks of which `blocks` are complete. Raise TransferError if it is live
        or the table is full."""
        self._leases.require_absent(lease_id)
        lease = _Lease(fence, ttl_s, now + ttl_s, total)
        if self._parts or len(blocks) < total:
            self._give_page(lease_id, lease)
        if lease.page is not None or len(blocks) == total:
            self._grant(lease_id, lease)
        self._leases.add(lease_id, lease)
        self._add(lease, blocks)

    def extend(self, lease_id: str, blocks: Sequence[int], now: float) -> None:
        """Add complete blocks and restart the lease's deadline."""
        lease = self._leases.renew(lease_id, now)
        if lease is None:
            return
        self._add(lease, blocks)
        if not lease.granted and lease.blocks == lease.total:
            try:
                self._grant(lease_id, lease)
            except TransferError as error:
                _log.warning("cannot publish lease %s: %s", lease_id, error.message)
                self.end(lease_id, "released")

    def end(self, lease_id: str, how: str) -> None:
        """End a lease if it is live."""
        self._leases.end(lease_id, how)

    def close(self) -> list[LeaseEnded]:
        """End every lease. Return the leases that ended since the last poll."""
        self._leases.release_all()
        self._sums.close()
        return self._leases.take_ended()

    def poll(self, now: float) -> list[LeaseEnded]:
        """Return the leases that ended since the last call."""
        for message in self._agent.notifications():
            notice = _parse(message)
            if notice is None or not notice.proves(self._secret):
                self._refusals.add("it sent a notice that a ticket's holder would not send")
                continue
            self._leases.confirm(notice.lease_id, notice.fence, BlockPart(notice.part, notice.of))
        self._leases.expire(now)
        return self._leases.take_ended()

    def take_refused(self) -> int:
        """Return how many notices were refused since the last call."""
        return self._refusals.take()

    def _withdraw(self, lease_id: str, lease: _Lease) -> None:
        if lease.granted:
            self._table.end(lease_id)
        self._free_page(lease)

    def _give_page(self, lease_id: str, lease: _Lease) -> None:
        size = page_bytes(lease.total, self._parts)
        lease.extent = self._pages.take(size) if size <= MAX_PAGE_BYTES else None
        if lease.extent is None:
            _log.warning(
                "lease %s on %d blocks has no page because page memory is full: it is published when it is "
                "complete, without checksums",
                lease_id,
                lease.total,
            )
            return
        memory = self._pages.view(lease.extent)
        lease.page = PageWriter(memory, lease_id, lease.fence, lease.total, self._parts)

    def _grant(self, lease_id: str, lease: _Lease) -> None:
        try:
            self._table.grant(lease_id, lease.fence, lease.extent)
        except TransferError:
            self._free_page(lease)
            raise
        lease.granted = True

    def _add(self, lease: _Lease, blocks: Sequence[int]) -> None:
        fresh = tuple(blocks[: lease.total - lease.blocks])
        lease.blocks += len(fresh)
        if fresh and lease.page is not None:
            sums = self._sums.begin(fresh, self._parts)
            with self._pages_lock:
                lease.unpublished.append((fresh, sums))
            sums.add_done_callback(lambda _: self._publish(lease))

    def _publish(self, lease: _Lease) -> None:
        with self._pages_lock:
            while lease.page is not None and lease.unpublished and lease.unpublished[0][1].done():
                ids, sums = lease.unpublished.popleft()
                lease.page.add(ids, sums.result())

    def _free_page(self, lease: _Lease) -> None:
        with self._pages_lock:
            if lease.extent is not None:
                self._pages.give(lease.extent)
            lease.extent = lease.page = None


def _proof(key: bytes, part: int, of: int) -> bytes:
    return mac(key, b"pulled", part.to_bytes(4, "little"), of.to_bytes(4, "little"))


def _parse(message: bytes) -> PulledNotice | None:
    if len(message) > MAX_NOTIFICATION_BYTES:
        return None
    try:
        notice = msgspec.msgpack.decode(message, type=PulledNotice)
    except msgspec.MsgspecError:
        return None
    fits = 0 <= notice.part < notice.of <= MAX_READERS and 0 <= notice.fence < 1 << 64
    return notice if fits else None
