"""What the serving side has on lease, shared by the step loop and the threads that send.

A lease ends exactly once: when every reader has confirmed, when it is released, or at its deadline. Who
reads blocks looks at the lease afterwards: one that is still live then was live while they were read, and
its blocks were not given to anybody else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import BlockPart, LeaseEnded
from kvasir_workers.transfer.checksums import Sums

MAX_LEASES = 8192
MAX_ENDED = 8192


class NcclLeaseState(Enum):
    """ABSENT: not granted yet, or ended long ago. FENCED: held, or ended, under another fence."""

    ABSENT = "absent"
    LIVE = "live"
    ENDED = "ended"
    FENCED = "fenced"


@dataclass(slots=True)
class _Lease:
    fence: int
    ttl_s: float
    deadline_s: float
    total: int
    sums: Sums
    blocks: list[int] = field(default_factory=list)
    summing: deque[tuple[tuple[int, ...], Future[Sums]]] = field(default_factory=deque)
    confirmed: set[BlockPart] = field(default_factory=set)


class LeaseBook:
    """Leases by id. `now` reads a clock in seconds; `parts` says how many sums each block has."""

    def __init__(self, now: Callable[[], float], parts: int) -> None:
        self._now = now
        self._parts = parts
        self._lock = threading.Lock()
        self._live: dict[str, _Lease] = {}
        self._over: OrderedDict[str, int] = OrderedDict()
        self._ended: list[LeaseEnded] = []

    def grant(self, lease_id: str, fence: int, ttl_s: float, total: int) -> None:
        """A lease on `total` blocks, none of them complete. Raises TransferError when it is live already or
        there are too many."""
        with self._lock:
            if lease_id in self._live:
                raise TransferError(f"lease {lease_id} is live already")
            if len(self._live) >= MAX_LEASES:
                raise TransferError(f"{MAX_LEASES} leases are live already")
            self._over.pop(lease_id, None)
            none = np.zeros((0, self._parts), dtype=np.uint64)
            self._live[lease_id] = _Lease(fence, ttl_s, self._now() + ttl_s, total, none)

    def add(self, lease_id: str, blocks: Sequence[int], sums: Future[Sums]) -> None:
        """More blocks, which are complete once their sums are known; the lease runs anew from here."""
        with self._lock:
            lease = self._live.get(lease_id)
            if lease is not None:
                lease.deadline_s = self._now() + lease.ttl_s
                lease.summing.append((tuple(blocks), sums))

    def end(self, lease_id: str, how: str) -> None:
        """End a lease if it is live."""
        with self._lock:
            self._end(lease_id, how)

    def confirm(self, lease_id: str, fence: int, part: BlockPart) -> None:
        """A reader holds its part of the lease's blocks; all of them together end it."""
        with self._lock:
            lease = self._live.get(lease_id)
            if lease is None or lease.fence != fence:
                return
            lease.confirmed.add(part)
            if sum(confirmed.of == part.of for confirmed in lease.confirmed) >= part.of:
                self._end(lease_id, "pulled")

    def look(self, lease_id: str, fence: int) -> tuple[NcclLeaseState, int]:
        """How a lease stands at this moment, and how many blocks a live one will have."""
        with self._lock:
            lease = self._live.get(lease_id)
            held = lease.fence if lease is not None else self._over.get(lease_id)
            if held is None:
                return NcclLeaseState.ABSENT, 0
            if held != fence:
                return NcclLeaseState.FENCED, 0
            if lease is None or self._now() >= lease.deadline_s:
                return NcclLeaseState.ENDED, 0
            return NcclLeaseState.LIVE, lease.total

    def complete(self, lease_id: str, first: int, most: int) -> tuple[tuple[int, ...], Sums]:
        """Up to `most` complete blocks of a live lease from number `first` on, and their sums."""
        with self._lock:
            lease = self._live.get(lease_id)
            if lease is None:
                return (), np.zeros((0, self._parts), dtype=np.uint64)
            while lease.summing and lease.summing[0][1].done():
                blocks, sums = lease.summing.popleft()
                lease.blocks += blocks
                lease.sums = np.concatenate((lease.sums, sums.result()))
            end = min(first + most, len(lease.blocks))
            return tuple(lease.blocks[first:end]), lease.sums[first:end]

    def take_ended(self) -> list[LeaseEnded]:
        """Leases that ended since the last call."""
        with self._lock:
            due = [name for name, lease in self._live.items() if self._now() >= lease.deadline_s]
            for lease_id in due:
                self._end(lease_id, "expired")
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> None:
        """End every lease."""
        with self._lock:
            for lease_id in list(self._live):
                self._end(lease_id, "released")

    def _end(self, lease_id: str, how: str) -> None:
        lease = self._live.pop(lease_id, None)
        if lease is None:
            return
        self._over[lease_id] = lease.fence
        while len(self._over) > MAX_ENDED:
            self._over.popitem(last=False)
        self._ended.append(LeaseEnded(lease_id, how))
