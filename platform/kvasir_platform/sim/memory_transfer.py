"""`KvTransfer` within one process: the fake that keeps the port's contract suite honest.

Agents share a `MemoryFabric`; bytes move by memmove in `poll`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion, LeaseEnded, Offer, Pulled, PullFailed, TransferEvent


@dataclass(slots=True)
class _Pull:
    pull_id: str
    offer: Offer
    source: tuple[int, ...]
    target: tuple[int, ...]
    started_s: float
    deadline_s: float


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
        self._leases: dict[str, tuple[int, float]] = {}
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

    def offer(self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float) -> Offer:
        """See the port."""
        if lease_id in self._leases:
            raise TransferError(f"lease {lease_id} is live already")
        self._leases[lease_id] = (fence, self._now() + ttl_s)
        self._tombstones.discard(lease_id)
        return Offer(lease_id, fence, ttl_s, tuple(blocks), self._name)

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        timeout_s: float,
    ) -> None:
        """See the port."""
        if pull_id in self._pulls:
            raise TransferError(f"pull {pull_id} is under way already")
        now = self._now()
        self._pulls[pull_id] = _Pull(
            pull_id, offer, tuple(source_blocks), tuple(target_blocks), now, now + timeout_s
        )

    def release(self, lease_id: str) -> None:
        """See the port."""
        self._end(lease_id, "released")

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        for lease_id in [i for i, (_, deadline) in self._leases.items() if self._now() >= deadline]:
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

    def _advance(self, pull: _Pull) -> Pulled | PullFailed | None:
        source = self._fabric.agents.get(pull.offer.endpoint)
        if source is None:
            return PullFailed(pull.pull_id, "unreachable", f"no agent {pull.offer.endpoint}")
        if source._layout != self._layout or not set(pull.source) <= set(pull.offer.blocks):
            return PullFailed(pull.pull_id, "layout", "the agents' KV differs, or blocks were not offered")
        held = source._leases.get(pull.offer.lease_id)
        if held is None:
            if pull.offer.lease_id in source._tombstones:
                return PullFailed(pull.pull_id, "expired", "the lease has ended")
            late = self._now() >= pull.deadline_s
            return PullFailed(pull.pull_id, "timeout", "no such lease") if late else None
        if held[0] != pull.offer.fence:
            return PullFailed(pull.pull_id, "fenced", "the lease is held under another fence")
        moved = 0
        for mine, theirs in zip(self._regions, source._regions, strict=True):
            for src, dst in zip(pull.source, pull.target, strict=True):
                size = mine.block_bytes
                ctypes.memmove(mine.address + dst * size, theirs.address + src * size, size)
                moved += size
        source._end(pull.offer.lease_id, "pulled")
        return Pulled(pull.pull_id, moved, self._now() - pull.started_s)

    def _end(self, lease_id: str, how: str) -> None:
        if self._leases.pop(lease_id, None) is not None:
            self._tombstones.add(lease_id)
            self._events.append(LeaseEnded(lease_id, how))
