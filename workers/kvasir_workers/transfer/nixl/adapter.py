"""`KvTransfer` over NIXL: a serving and a receiving agent behind one port.

They are two because the receiving one may have to be replaced (see receiving.py), which must not cut the
peers that read from the serving one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion, Offer, TransferEvent
from kvasir_workers.transfer.checksums import block_sums, require_parts
from kvasir_workers.transfer.nixl.agent import NixlAgent, device_ordinal, has_rdma, senders_answer
from kvasir_workers.transfer.nixl.endpoint import VERSION, NixlEndpoint, encode
from kvasir_workers.transfer.nixl.landing import DirectLanding, StagedLanding
from kvasir_workers.transfer.nixl.leases import TABLE_BYTES, NixlLeaseTable
from kvasir_workers.transfer.nixl.pages import PageMemory, memory_bytes
from kvasir_workers.transfer.nixl.receiving import NixlReceiver
from kvasir_workers.transfer.nixl.serving import NixlSender

Side = TypeVar("Side", NixlSender, NixlReceiver)


class NixlTransfer:
    """See `kvasir.ports.transfer.KvTransfer`.

    `name` must be unique in the fleet and differ with every start. `host` is the address to serve on:
    a loopback address keeps UCX on the loopback interface; otherwise UCX chooses, steered by UCX_*
    variables. `now` reads a monotonic clock in seconds. `checksum_parts` sums are given for each block that
    is offered, and what is pulled is compared with its sender's; 0 for neither.
    """

    def __init__(self, name: str, host: str, now: Callable[[], float], checksum_parts: int = 1) -> None:
        self._name = name
        self._host = host
        self._now = now
        self._parts = checksum_parts
        self._table = NixlLeaseTable()
        self._agent: NixlAgent | None = None
        self._serving: NixlSender | None = None
        self._receiving: NixlReceiver | None = None
        self._endpoint = ""
        self._receivers = 0
        self._farewell: list[TransferEvent] = []

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        """Make local KV memory known to the fabric; returns this agent's endpoint. Raises TransferError
        when called twice, when regions lie on different devices, or when blocks cannot be summed."""
        if self._agent is not None:
            raise TransferError("KV memory is registered already")
        if len({region.device for region in regions}) != 1:
            raise TransferError("an agent's KV must lie on one device")
        require_parts(regions, self._parts)
        device = regions[0].device
        agent = NixlAgent(f"{self._name}-serve", self._host)
        agent.register(
            [(r.address, r.blocks * r.block_bytes, device_ordinal(device)) for r in regions], device
        )
        pages = PageMemory(memory_bytes(regions[0].blocks, self._parts))
        agent.register([(self._table.address, TABLE_BYTES, 0), (pages.address, len(pages.bytes), 0)], "cpu")
        self._agent = agent
        sums = block_sums(regions, after_compute=True)
        self._serving = NixlSender(agent, self._table, pages, sums, self._parts)
        received = block_sums(regions, after_compute=False) if self._parts else None
        landing = (StagedLanding if senders_answer(self._host, rdma=has_rdma()) else DirectLanding)(regions)
        self._receiving = NixlReceiver(self._receiver, regions, layout, landing, received, now=self._now)
        self._endpoint = encode(
            NixlEndpoint(
                VERSION,
                agent.name,
                agent.metadata(),
                tuple(regions),
                self._table.address,
                pages.address,
                len(pages.bytes),
                self._parts,
                layout,
            )
        )
        return self._endpoint

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """See the port. Raises TransferError also when the lease table is full."""
        total = len(blocks) if total is None else total
        _ready(self._serving).offer(lease_id, fence, blocks, total=total, ttl_s=ttl_s, now=self._now())
        return Offer(lease_id, fence, ttl_s, tuple(blocks), total, self._endpoint)

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """See the port."""
        _ready(self._serving).extend(lease_id, blocks, self._now())

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        target_blocks: Sequence[int],
        timeout_s: float,
        *,
        source: BlockPart = UNSHARDED,
        target: BlockPart = UNSHARDED,
    ) -> None:
        """See the port."""
        _ready(self._receiving).pull(
            pull_id, offer, first, target_blocks, timeout_s, source=source, target=target
        )

    def release(self, lease_id: str) -> None:
        """See the port."""
        if self._serving is not None:
            self._serving.end(lease_id, "released")

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        events, self._farewell = self._farewell, []
        if self._serving is not None:
            events += self._serving.poll(self._now())
        if self._receiving is not None:
            events += self._receiving.poll()
        return events

    def close(self) -> None:
        """See the port. What was under way ends as closed or released, in the next poll()."""
        if self._agent is None or self._serving is None or self._receiving is None:
            return
        self._farewell += self._receiving.close()
        self._farewell += self._serving.close()
        self._agent.close()
        self._agent = self._serving = self._receiving = None

    def _receiver(self) -> NixlAgent:
        self._receivers += 1
        return NixlAgent(f"{self._name}-pull-{self._receivers}", self._host)


def _ready(side: Side | None) -> Side:
    if side is None:
        raise TransferError("no KV memory is registered")
    return side
