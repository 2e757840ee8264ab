"""Leases on prefilled KV: blocks wait until a deadline for the worker that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir_workers.engines.sim.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks pinned until `deadline_s`. A puller must have the same `fence`."""

    lease_id: str
    fence: int
    blocks: tuple[int, ...]
    deadline_s: float


class SimLeaseTable:
    """The live leases of one engine. Each ends once: pulled, released or expired."""

    def __init__(self, pool: BlockPool, ttl_s: float) -> None:
        self._pool = pool
        self._ttl_s = ttl_s
        # All have the same time to live, so the order of their last extension is deadline order.
        self._live: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, lease_id: str, fence: int, blocks: list[int], now: float) -> Lease:
        """Pin `blocks`. Lease ids are never reused."""
        lease = Lease(lease_id, fence, tuple(blocks), now + self._ttl_s)
        self._pool.lease(blocks)
        self._live[lease_id] = lease
        return lease

    def extend(self, lease_id: str, blocks: Sequence[int], now: float) -> None:
        """Pin more blocks under a live lease, which follow the earlier ones, and restart its time to live."""
        lease = self._live.pop(lease_id)
        self._pool.lease(blocks)
        self._live[lease_id] = replace(lease, blocks=(*lease.blocks, *blocks), deadline_s=now + self._ttl_s)

    def find(self, lease_id: str) -> Lease | None:
        """Return the lease if it is live."""
        return self._live.get(lease_id)

    def end(self, lease_id: str) -> None:
        """Free a lease's blocks; unknown ids are ignored."""
        lease = self._live.pop(lease_id, None)
        if lease is not None:
            self._pool.unlease(lease.blocks)

    def expire(self, now: float) -> None:
        """End the leases past their deadline."""
        while self._live:
            lease = next(iter(self._live.values()))
            if lease.deadline_s > now:
                return
            self.end(lease.lease_id)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, None without leases."""
        return next(iter(self._live.values())).deadline_s if self._live else None

    def blocks(self) -> list[tuple[int, ...]]:
        """Return the blocks of each live lease."""
        return [lease.blocks for lease in self._live.values()]

    def clear(self) -> None:
        """End all leases."""
        for lease_id in list(self._live):
            self.end(lease_id)
