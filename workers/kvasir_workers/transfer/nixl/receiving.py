"""The pulling side.

A pull reads the blocks, then the lease, then tells the sender. Its end is reported only when nothing can
write to its target blocks any more, because the engine reuses them at once. That is the hard part: a
read that was posted cannot be called back. Neither releasing the handle nor dropping the peer stops it
over TCP (measured: a sender that was stopped and continued filled memory seconds after both); only
closing the receiving agent does. So a pull that is late waits until the healthy pulls are through,
which their own deadlines bound, then the agent is replaced and the late pull fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion, Offer, Pulled, PullFailed
from kvasir_workers.transfer.nixl import leases
from kvasir_workers.transfer.nixl.agent import Descriptor, NixlAgent, XferState, device_ordinal
from kvasir_workers.transfer.nixl.endpoint import Endpoint, decode, layout_differences
from kvasir_workers.transfer.nixl.leases import LeaseState
from kvasir_workers.transfer.nixl.serving import PulledNotice
from kvasir_workers.transfer.runs import merge

BATCH_BYTES = 8 << 20
POLL_BUDGET_S = 0.002
MAX_PEERS = 256
MAX_PULLS = 1024

Batch = tuple[list[Descriptor], list[Descriptor]]


@dataclass(slots=True)
class _Pull:
    pull_id: str
    offer: Offer
    endpoint: Endpoint
    batches: list[Batch]
    bytes_total: int
    started_s: float
    deadline_s: float
    slot: int
    next_batch: int = 0
    reads: list[int] = field(default_factory=list)
    check: int | None = None
    failure: tuple[str, str] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether something may still write for this pull."""
        return bool(self.reads) or self.check is not None


class ReceivingSide:
    """Pulls under way over one NIXL agent, which is replaced when a pull cannot be stopped otherwise."""

    def __init__(
        self,
        make_agent: Callable[[], NixlAgent],
        regions: Sequence[KvRegion],
        layout: KvLayout,
        now: Callable[[], float],
    ) -> None:
        self._make_agent = make_agent
        self._regions = tuple(regions)
        self._device = regions[0].device
        self._layout = layout
        self._now = now
        self._scratch: npt.NDArray[Any] = np.zeros((MAX_PULLS, leases.BUCKET_BYTES), dtype=np.uint8)
        self._slots = list(range(MAX_PULLS))
        self._pulls: dict[str, _Pull] = {}
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._broken: set[str] = set()
        self._ended: list[Pulled | PullFailed] = []
        self._fencing = False
        self._agent = self._start_agent()

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Begin a pull. What is wrong with it comes as PullFailed from poll(); raises TransferError
        only for a pull_id that is under way."""
        if pull_id in self._pulls:
            raise TransferError(f"pull {pull_id} is under way already")
        if not self._slots:
            self._ended.append(PullFailed(pull_id, "io", f"{MAX_PULLS} pulls are under way already"))
            return
        try:
            endpoint = decode(offer.endpoint)
            self._check_fits(endpoint, offer, source_blocks, target_blocks)
        except TransferError as error:
            self._ended.append(PullFailed(pull_id, "layout", error.message))
            return
        now = self._now()
        self._pulls[pull_id] = _Pull(
            pull_id=pull_id,
            offer=offer,
            endpoint=endpoint,
            batches=self._batches(endpoint, source_blocks, target_blocks),
            bytes_total=len(source_blocks) * sum(region.block_bytes for region in self._regions),
            started_s=now,
            deadline_s=now + timeout_s,
            slot=self._slots.pop(),
        )

    def poll(self) -> list[Pulled | PullFailed]:
        """Progress every pull; those that ended."""
        post_until = self._now() + POLL_BUDGET_S
        for pull in list(self._pulls.values()):
            self._advance(pull, post_until)
        self._fence_late()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> list[Pulled | PullFailed]:
        """Fail what is left; the pulls that ended since the last poll."""
        self._agent.close()
        for pull in list(self._pulls.values()):
            self._finish(pull, PullFailed(pull.pull_id, "closed", "the receiving agent was closed"))
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, pull: _Pull, post_until: float) -> None:
        if pull.failure is None and self._now() >= pull.deadline_s:
            pull.failure = ("timeout", f"not pulled within {pull.deadline_s - pull.started_s:g} s")
        self._collect_reads(pull)
        if pull.failure is None:
            self._post_reads(pull, post_until)
        if pull.failure is None and pull.next_batch == len(pull.batches) and not pull.reads:
            self._verify_lease(pull)
        if pull.failure is not None and not pull.in_flight:
            self._finish(pull, PullFailed(pull.pull_id, *pull.failure))

    def _collect_reads(self, pull: _Pull) -> None:
        running = []
        for handle in pull.reads:
            if self._settled(pull, handle) is None:
                running.append(handle)
        pull.reads = running
        if (
            pull.failure is not None
            and pull.check is not None
            and self._settled(pull, pull.check) is not None
        ):
            pull.check = None

    def _settled(self, pull: _Pull, handle: int) -> XferState | None:
        """How a read ended, or None while it runs. A failed one marks the pull and the peer."""
        state = self._agent.state(handle)
        if state is XferState.RUNNING:
            return None
        self._agent.release(handle)
        if state is XferState.FAILED:
            self._broken.add(pull.endpoint.agent)
            pull.failure = pull.failure or ("io", f"agent {pull.endpoint.agent} broke off")
        return state

    def _post_reads(self, pull: _Pull, post_until: float) -> None:
        try:
            if self._fencing and pull.next_batch == 0:
                return
            while pull.next_batch < len(pull.batches):
                local, remote = pull.batches[pull.next_batch]
                self._connect(pull.endpoint)
                pull.reads.append(self._agent.read(pull.endpoint.agent, local, remote, self._device))
                pull.next_batch += 1
                if self._now() >= post_until:
                    return
        except TransferError as error:
            self._broken.add(pull.endpoint.agent)
            pull.failure = ("unreachable", error.message)

    def _verify_lease(self, pull: _Pull) -> None:
        """Read the lease after the last byte; only a live one makes the bytes good."""
        peer = pull.endpoint.agent
        bucket = self._scratch[pull.slot]
        try:
            if pull.check is None:
                if self._fencing and not pull.batches:
                    return
                self._connect(pull.endpoint)
                bucket[:] = 0
                local = (int(bucket.ctypes.data), leases.BUCKET_BYTES, 0)
                remote = pull.endpoint.leases + leases.bucket_offset(pull.offer.lease_id)
                pull.check = self._agent.read(peer, [local], [(remote, leases.BUCKET_BYTES, 0)], "cpu")
            if self._settled(pull, pull.check) is None:
                return
            pull.check = None
            if pull.failure is not None:
                return
            found = leases.look_up(bucket.tobytes(), pull.offer.lease_id, pull.offer.fence)
            if found is LeaseState.LIVE:
                self._agent.notify(
                    peer, msgspec.msgpack.encode(PulledNotice(pull.offer.lease_id, pull.offer.fence))
                )
                seconds = self._now() - pull.started_s
                self._finish(pull, Pulled(pull.pull_id, pull.bytes_total, seconds))
            elif found is LeaseState.ENDED:
                pull.failure = ("expired", f"lease {pull.offer.lease_id} has ended")
            elif found is LeaseState.FENCED:
                pull.failure = ("fenced", f"lease {pull.offer.lease_id} is held under another fence")
            # An absent lease is looked up again until the deadline: a ticket may overtake its offer.
        except TransferError as error:
            self._broken.add(peer)
            pull.failure = ("unreachable", error.message)

    def _finish(self, pull: _Pull, event: Pulled | PullFailed) -> None:
        del self._pulls[pull.pull_id]
        self._slots.append(pull.slot)
        self._ended.append(event)

    def _fence_late(self) -> None:
        late = [p for p in self._pulls.values() if p.in_flight and self._now() >= p.deadline_s]
        self._fencing = bool(late)
        if not late or any(p.in_flight and p not in late for p in self._pulls.values()):
            return
        self._agent.close()
        self._peers.clear()
        self._broken.clear()
        self._agent = self._start_agent()
        self._fencing = False
        for pull in late:
            reason, detail = pull.failure or ("timeout", "")
            self._finish(pull, PullFailed(pull.pull_id, reason, detail))

    def _connect(self, endpoint: Endpoint) -> None:
        peer = endpoint.agent
        if peer in self._broken:
            if any(p.in_flight and p.endpoint.agent == peer for p in self._pulls.values()):
                raise TransferError(f"agent {peer} is broken off")
            self._forget(peer)
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return
        while len(self._peers) >= MAX_PEERS:
            busy = {p.endpoint.agent for p in self._pulls.values() if p.in_flight}
            self._forget(next(name for name in self._peers if name not in busy))
        self._agent.add_peer(endpoint.metadata, peer)
        self._peers[peer] = None

    def _forget(self, peer: str) -> None:
        self._broken.discard(peer)
        if peer in self._peers:
            del self._peers[peer]
            self._agent.forget_peer(peer)

    def _start_agent(self) -> NixlAgent:
        agent = self._make_agent()
        agent.register([_whole(region) for region in self._regions], self._device)
        agent.register([(int(self._scratch.ctypes.data), self._scratch.nbytes, 0)], "cpu")
        return agent

    def _check_fits(
        self, endpoint: Endpoint, offer: Offer, source: Sequence[int], target: Sequence[int]
    ) -> None:
        differences = layout_differences(self._layout, endpoint.layout)
        mine = [region.block_bytes for region in self._regions]
        theirs = [region.block_bytes for region in endpoint.regions]
        if mine != theirs:
            differences.append(f"block_bytes: {mine} != {theirs}")
        if differences:
            raise TransferError(f"the KV of agent {endpoint.agent} differs: " + "; ".join(differences))
        if len(source) != len(target):
            raise TransferError(f"{len(source)} source blocks for {len(target)} target blocks")
        if not set(source) <= set(offer.blocks):
            raise TransferError(f"blocks {sorted(set(source) - set(offer.blocks))} are not in the offer")
        if any(not 0 <= block < region.blocks for region in endpoint.regions for block in source):
            raise TransferError("the offer names blocks outside the offering side's memory")
        if any(not 0 <= block < region.blocks for region in self._regions for block in target):
            raise TransferError("a target block lies outside the receiving side's memory")

    def _batches(self, endpoint: Endpoint, source: Sequence[int], target: Sequence[int]) -> list[Batch]:
        batches: list[Batch] = []
        room = 0
        for mine, theirs in zip(self._regions, endpoint.regions, strict=True):
            for run in merge(source, target, max(1, BATCH_BYTES // mine.block_bytes)):
                length = run.blocks * mine.block_bytes
                if length > room:
                    batches.append(([], []))
                    room = max(BATCH_BYTES, length)
                room -= length
                local, remote = batches[-1]
                local.append(_part(mine, run.target, length))
                remote.append(_part(theirs, run.source, length))
        return batches


def _whole(region: KvRegion) -> Descriptor:
    return _part(region, 0, region.blocks * region.block_bytes)


def _part(region: KvRegion, block: int, length: int) -> Descriptor:
    return (region.address + block * region.block_bytes, length, device_ordinal(region.device))
