"""`KvTransfer` within one process: the fake that passes the port's contract suite.

Agents share a `MemoryFabric`; bytes move by memmove in `poll`.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import (
    UNSHARDED,
    BlockPart,
    KvRegion,
    LeaseEnded,
    Offer,
    PullFailed,
    PullSucceeded,
    TransferEvent,
)


@dataclass(slots=True)
class _Pull:
    pull_id: str
    offer: Offer
    first: int
    target: tuple[int, ...]
    timeout_s: float
    source_part: BlockPart
    target_part: BlockPart
    reader: BlockPart
    started_s: float
    deadline_s: float
    copied: int = 0


@dataclass(slots=True)
class _Lease:
    fence: int
    ttl_s: float
    deadline_s: float
    total: int
    blocks: list[int] = field(default_factory=list)
    sums: list[bytes] = field(default_factory=list)
    confirmed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class MemoryFabric:
    """The agents that can reach each other, by endpoint."""

    agents: dict[str, MemoryTransfer] = field(default_factory=dict)


class MemoryTransfer:
    """See `kvasir.ports.transfer.KvTransfer`. `now` reads a clock in seconds."""

    def __init__(self, name: str, fabric: MemoryFabric, now: Callable[[], float]) -> None:
        self._name = name
        self._fabric = fabric
        self._now = now
        self._regions: tuple[KvRegion, ...] = ()
        self._layout: KvLayout | None = None
        self._leases: dict[str, _Lease] = {}
        self._tombstones: set[str] = set()
        self._pulls: dict[str, _Pull] = {}
        self._events: list[TransferEvent] = []

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        """See the port."""
        if self._layout is not None:
            raise TransferError("KV memory is registered already")
        self._regions, self._layout = tuple(regions), layout
        self._fabric.agents[self._name] = self
        return self._name

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """See the port."""
        if lease_id in self._leases:
            raise TransferError(f"lease {lease_id} is live already")
        total = len(blocks) if total is None else total
        self._leases[lease_id] = _Lease(fence, ttl_s, self._now() + ttl_s, total)
        self._tombstones.discard(lease_id)
        self.extend(lease_id, blocks)
        return Offer(lease_id, fence, ttl_s, tuple(blocks), total, self._name)

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """See the port."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.blocks += blocks
            lease.sums += [self._sum(block) for block in blocks]
            lease.deadline_s = self._now() + lease.ttl_s

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
        reader: BlockPart | None = None,
    ) -> None:
        """See the port."""
        if pull_id in self._pulls:
            raise TransferError(f"pull {pull_id} is under way already")
        now = self._now()
        self._pulls[pull_id] = _Pull(
            pull_id,
            offer,
            first,
            tuple(target_blocks),
            timeout_s,
            source,
            target,
            reader or source,
            now,
            now + timeout_s,
        )

    def release(self, lease_id: str) -> None:
        """See the port."""
        self._end(lease_id, "released")

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        late = [i for i, lease in self._leases.items() if self._now() >= lease.deadline_s]
        for lease_id in late:
            self._end(lease_id, "expired")
        for pull in list(self._pulls.values()):
            ended = self._advance(pull)
            if ended is not None:
                del self._pulls[pull.pull_id]
                self._events.append(ended)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See the port."""
        self._fabric.agents.pop(self._name, None)
        for lease_id in list(self._leases):
            self._end(lease_id, "released")
        for pull_id in list(self._pulls):
            del self._pulls[pull_id]
            self._events.append(PullFailed(pull_id, "closed", "the agent was closed"))

    def _advance(self, pull: _Pull) -> PullSucceeded | PullFailed | None:
        source = self._fabric.agents.get(pull.offer.endpoint)
        if source is None:
            return PullFailed(pull.pull_id, "unreachable", f"no agent {pull.offer.endpoint}")
        misfit = self._misfit(pull, source)
        if misfit:
            return PullFailed(pull.pull_id, "layout", misfit)
        lease = source._leases.get(pull.offer.lease_id)
        if lease is None and pull.offer.lease_id not in source._tombstones:
            return self._patience(pull, "no such lease")
        return self._take(pull, source, lease)

    def _take(
        self, pull: _Pull, source: MemoryTransfer, lease: _Lease | None
    ) -> PullSucceeded | PullFailed | None:
        """The result of a pull that fits, under a lease that was granted at some time."""
        if lease is None:
            return PullFailed(pull.pull_id, "expired", "the lease has ended")
        if lease.fence != pull.offer.fence:
            return PullFailed(pull.pull_id, "fenced", "the lease is held under another fence")
        if not self._copy(pull, source, lease):
            return PullFailed(pull.pull_id, "checksum", "a block changed after it was offered")
        if pull.copied < len(pull.target):
            return self._patience(pull, f"{len(lease.blocks)} of {lease.total} blocks are complete")
        source._confirm(pull.offer.lease_id, pull.reader)
        moved = len(pull.target) * sum(r.block_bytes // pull.target_part.of for r in self._regions)
        return PullSucceeded(pull.pull_id, moved, self._now() - pull.started_s)

    def _misfit(self, pull: _Pull, source: MemoryTransfer) -> str:
        mine, theirs = self._layout, source._layout
        if mine is None or theirs is None or mine.differences(theirs):
            return "the agents' KV differs"
        sizes = {
            (m.block_bytes * pull.source_part.of, t.block_bytes * pull.target_part.of)
            for m, t in zip(self._regions, source._regions, strict=True)
        }
        if any(m != t for m, t in sizes):
            return "the parts differ in size"
        return (
            "more blocks are wanted than offered" if pull.first + len(pull.target) > pull.offer.total else ""
        )

    def _copy(self, pull: _Pull, source: MemoryTransfer, lease: _Lease) -> bool:
        """Copy all complete blocks that are not copied yet; return whether all are as they were offered."""
        for place in range(pull.first + pull.copied, min(len(lease.blocks), pull.first + len(pull.target))):
            src, dst = lease.blocks[place], pull.target[place - pull.first]
            if source._sum(src) != lease.sums[place]:
                return False
            for mine, theirs in zip(self._regions, source._regions, strict=True):
                size = mine.block_bytes // pull.target_part.of
                to = mine.address + dst * mine.block_bytes + pull.target_part.index * size
                ctypes.memmove(
                    to, theirs.address + src * theirs.block_bytes + pull.source_part.index * size, size
                )
            pull.copied += 1
            pull.deadline_s = self._now() + pull.timeout_s
        return True

    def _patience(self, pull: _Pull, why: str) -> PullFailed | None:
        return PullFailed(pull.pull_id, "timeout", why) if self._now() >= pull.deadline_s else None

    def _confirm(self, lease_id: str, part: BlockPart) -> None:
        confirmed = self._leases[lease_id].confirmed
        confirmed.add(part.index)
        if len(confirmed) == part.of:
            self._end(lease_id, "pulled")

    def _sum(self, block: int) -> bytes:
        found = hashlib.blake2b(digest_size=8)
        for region in self._regions:
            found.update(ctypes.string_at(region.address + block * region.block_bytes, region.block_bytes))
        return found.digest()

    def _end(self, lease_id: str, how: str) -> None:
        if self._leases.pop(lease_id, None) is not None:
            self._tombstones.add(lease_id)
            self._events.append(LeaseEnded(lease_id, how))
