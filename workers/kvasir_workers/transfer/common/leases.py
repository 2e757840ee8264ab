"""Leases that a serving agent has granted: their states, and the rules by which each of them ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import BlockPart, LeaseEnded


class LeaseState(IntEnum):
    """State of a lease as seen by a reader with a fence. ABSENT: not granted yet, or ended long ago. FENCED:
    granted under another fence. The values are part of the format of NIXL's lease table."""

    ABSENT = 0
    LIVE = 1
    ENDED = 2
    FENCED = 3


def refusal(state: LeaseState, lease_id: str) -> tuple[str, str]:
    """Return reason and detail of the failure of a pull from a lease that is FENCED or ENDED."""
    if state is LeaseState.FENCED:
        return "fenced", f"lease {lease_id} is held under another fence"
    return "expired", f"lease {lease_id} has ended"


@dataclass(slots=True)
class TransferLease:
    """A lease on `total` blocks. `confirmed` are the parts whose readers have confirmed."""

    fence: int
    ttl_s: float
    deadline_s: float
    total: int
    confirmed: set[BlockPart] = field(default_factory=set)


LeaseT = TypeVar("LeaseT", bound=TransferLease)


class LiveLeases(Generic[LeaseT]):
    """Live leases by id. A lease ends exactly once: when every reader has confirmed its part, when it is
    released, or at its deadline. `on_end` is called with each lease that ends. Not thread-safe."""

    def __init__(self, on_end: Callable[[str, LeaseT], None]) -> None:
        self._on_end = on_end
        self._live: dict[str, LeaseT] = {}
        self._ended: list[LeaseEnded] = []

    def __len__(self) -> int:
        return len(self._live)

    def get(self, lease_id: str) -> LeaseT | None:
        """Return a live lease, or None."""
        return self._live.get(lease_id)

    def require_absent(self, lease_id: str) -> None:
        """Raise TransferError if the lease is live."""
        if lease_id in self._live:
            raise TransferError(f"lease {lease_id} is live already")

    def add(self, lease_id: str, lease: LeaseT) -> None:
        """Add a lease. Raise TransferError if one of this id is live."""
        self.require_absent(lease_id)
        self._live[lease_id] = lease

    def renew(self, lease_id: str, now: float) -> LeaseT | None:
        """Restart the deadline of a live lease and return the lease; None if it is not live."""
        lease = self._live.get(lease_id)
        if lease is not None:
            lease.deadline_s = now + lease.ttl_s
        return lease

    def confirm(self, lease_id: str, fence: int, part: BlockPart) -> None:
        """Record that a reader holds its part of the blocks; the last part ends the lease. Ignored under
        another fence."""
        lease = self._live.get(lease_id)
        if lease is None or lease.fence != fence:
            return
        lease.confirmed.add(part)
        if sum(confirmed.of == part.of for confirmed in lease.confirmed) >= part.of:
            self.end(lease_id, "pulled")

    def end(self, lease_id: str, how: str) -> None:
        """End a lease if it is live."""
        lease = self._live.pop(lease_id, None)
        if lease is not None:
            self._on_end(lease_id, lease)
            self._ended.append(LeaseEnded(lease_id, how))

    def expire(self, now: float) -> None:
        """End the leases that are past their deadline."""
        for lease_id in [name for name, lease in self._live.items() if now >= lease.deadline_s]:
            self.end(lease_id, "expired")

    def release_all(self) -> None:
        """End every lease."""
        for lease_id in list(self._live):
            self.end(lease_id, "released")

    def take_ended(self) -> list[LeaseEnded]:
        """Return the leases that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended
