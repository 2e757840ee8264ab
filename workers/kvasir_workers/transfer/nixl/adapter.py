"""`KvTransfer` over NIXL, with a serving and a receiving agent.

They are separate because the receiving agent may have to be replaced (see receiving.py), which must not break
the connections of peers that read from the serving one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion, LeaseEnded
from kvasir_workers.transfer.common.adapter import AgentTransfer
from kvasir_workers.transfer.common.checksums import block_sums
from kvasir_workers.transfer.common.lease_keys import Refusals, make_secret, seal
from kvasir_workers.transfer.common.nics import rdma_ports
from kvasir_workers.transfer.nixl.agent import NixlAgent, device_ordinal, kernel_reads, senders_answer
from kvasir_workers.transfer.nixl.endpoint import VERSION, NixlEndpoint, encode
from kvasir_workers.transfer.nixl.landing import DirectLanding, StagedLanding
from kvasir_workers.transfer.nixl.leases import TABLE_BYTES, NixlLeaseTable
from kvasir_workers.transfer.nixl.pages import PageMemory, memory_bytes
from kvasir_workers.transfer.nixl.processes import ProcessReads, this_process
from kvasir_workers.transfer.nixl.receiving import NixlReceiver
from kvasir_workers.transfer.nixl.serving import NixlSender


@dataclass(frozen=True, slots=True)
class _ClockedSender:
    """A NixlSender and its clock."""

    sender: NixlSender
    now: Callable[[], float]

    def offer(self, lease_id: str, fence: int, blocks: Sequence[int], *, total: int, ttl_s: float) -> None:
        self.sender.offer(lease_id, fence, blocks, total=total, ttl_s=ttl_s, now=self.now())

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        self.sender.extend(lease_id, blocks, self.now())

    def release(self, lease_id: str) -> None:
        self.sender.end(lease_id, "released")

    def poll(self) -> list[LeaseEnded]:
        return self.sender.poll(self.now())

    def take_refused(self) -> int:
        return self.sender.take_refused()

    def close(self) -> list[LeaseEnded]:
        return self.sender.close()


class NixlTransfer(AgentTransfer):
    """See AgentTransfer. `name` must be unique in the fleet and differ with every start. `host` is the
    address to serve on: with a loopback address, UCX uses shared memory; otherwise RDMA, and TCP if `tcp` is
    set. UCX_* variables take precedence."""

    def __init__(
        self,
        name: str,
        host: str,
        now: Callable[[], float],
        checksum_parts: int = 1,
        *,
        tcp: bool = False,
    ) -> None:
        super().__init__(now, checksum_parts)
        self._name = name
        self._host = host
        self._tcp = tcp
        self._table = NixlLeaseTable()
        self._agent: NixlAgent | None = None
        self._receivers = 0

    def close(self) -> None:
        """See the port."""
        super().close()
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _start(
        self, regions: Sequence[KvRegion], layout: KvLayout
    ) -> tuple[_ClockedSender, NixlReceiver, str]:
        device = regions[0].device
        agent = NixlAgent(f"{self._name}-serve", self._host, tcp=self._tcp)
        agent.register(
            [(r.address, r.blocks * r.block_bytes, device_ordinal(device)) for r in regions], device
        )
        pages = PageMemory(memory_bytes(regions[0].blocks, self._parts))
        agent.register([(self._table.address, TABLE_BYTES, 0), (pages.address, len(pages.bytes), 0)], "cpu")
        self._agent = agent
        sums = block_sums(regions, after_compute=True)
        secret = make_secret()
        serving = NixlSender(
            agent, self._table, pages, sums, self._parts, secret=secret, refusals=Refusals(self._now)
        )
        sender = _ClockedSender(serving, self._now)
        received = block_sums(regions, after_compute=False) if self._parts else None
        landing = (StagedLanding if senders_answer(self._host, rdma=bool(rdma_ports())) else DirectLanding)(
            regions
        )
        mine = this_process() if device == "cpu" and kernel_reads(self._host) else None
        receiver = NixlReceiver(
            self._receiver_agent,
            regions,
            layout,
            landing,
            received,
            now=self._now,
            by_kernel=None if mine is None else ProcessReads(mine),
        )
        endpoint = NixlEndpoint(
            VERSION,
            agent.name,
            agent.metadata(),
            tuple(regions),
            self._table.address,
            pages.address,
            len(pages.bytes),
            self._parts,
            layout,
            mine,
        )
        return sender, receiver, seal(encode(endpoint), [secret])

    def _receiver_agent(self) -> NixlAgent:
        self._receivers += 1
        return NixlAgent(f"{self._name}-pull-{self._receivers}", self._host, tcp=self._tcp)
