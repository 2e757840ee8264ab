"""The leases of a serving agent, shared by the step loop and the threads that send.

A thread reads blocks first and looks at the lease afterwards. A lease that is live then was live while its
blocks were read, so the blocks had not been reused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import BlockPart, LeaseEnded
from kvasir_workers.transfer.common.checksums import Sums
from kvasir_workers.transfer.common.leases import LeaseState, LiveLeases, TransferLease

MAX_LEASES = 8192
MAX_ENDED = 8192


@dataclass(slots=True)
class _Lease(TransferLease):
    sums: Sums = field(kw_only=True)
    blocks: list[int] = field(default_factory=list)
    summing: deque[tuple[tuple[int, ...], Future[Sums]]] = field(default_factory=deque)


class LeaseBook:
    """Leases by id; thread-safe. `now` reads a clock in seconds; `parts` is the number of checksums per
    block."""

    def __init__(self, now: Callable[[], float], parts: int) -> None:
        self._now = now
        self._parts = parts
        self._lock = threading.Lock()
        self._leases: LiveLeases[_Lease] = LiveLeases(self._remember)
        self._ended_fences: OrderedDict[str, int] = OrderedDict()

    def grant(self, lease_id: str, fence: int, ttl_s: float, total: int) -> None:
        """Grant a lease on `total` blocks, none of them complete. Raise TransferError if the lease is live or
        MAX_LEASES are."""
        with self._lock:
            self._leases.require_absent(lease_id)
            if len(self._leases) >= MAX_LEASES:
                raise TransferError(f"{MAX_LEASES} leases are live already")
            self._ended_fences.pop(lease_id, None)
            none = np.zeros((0, self._parts), dtype=np.uint64)
            self._leases.add(lease_id, _Lease(fence, ttl_s, self._now() + ttl_s, total, sums=none))

    def add(self, lease_id: str, blocks: Sequence[int], sums: Future[Sums]) -> None:
        """Add blocks, which are complete once their sums are known, and restart the lease's deadline."""
        with self._lock:
            lease = self._leases.renew(lease_id, self._now())
            if lease is not None:
                lease.summing.append((tuple(blocks), sums))

    def end(self, lease_id: str, how: str) -> None:
        """End a lease if it is live."""
        with self._lock:
            self._leases.end(lease_id, how)

    def confirm(self, lease_id: str, fence: int, part: BlockPart) -> None:
        """Record that a reader holds its part of the blocks; all parts together end the lease."""
        with self._lock:
            self._leases.confirm(lease_id, fence, part)

    def look(self, lease_id: str, fence: int) -> tuple[LeaseState, int]:
        """Return the state of a lease, and the total of blocks of a live one (0 for any other)."""
        with self._lock:
            lease = self._leases.get(lease_id)
            held = lease.fence if lease is not None else self._ended_fences.get(lease_id)
            if held is None:
                return LeaseState.ABSENT, 0
            if held != fence:
                return LeaseState.FENCED, 0
            if lease is None or self._now() >= lease.deadline_s:
                return LeaseState.ENDED, 0
            return LeaseState.LIVE, lease.total

    def complete(self, lease_id: str, first: int, most: int) -> tuple[tuple[int, ...], Sums]:
        """Return up to `most` complete blocks of a live lease from number `first` on, and their sums."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return (), np.zeros((0, self._parts), dtype=np.uint64)
            while lease.summing and lease.summing[0][1].done():
                blocks, sums = lease.summing.popleft()
                lease.blocks += blocks
                lease.sums = np.concatenate((lease.sums, sums.result()))
            end = min(first + most, len(lease.blocks))
            return tuple(lease.blocks[first:end]), lease.sums[first:end]

    def take_ended(self) -> list[LeaseEnded]:
        """End leases past their deadline. Return those that ended since the last call."""
        with self._lock:
            self._leases.expire(self._now())
            return self._leases.take_ended()

    def close(self) -> None:
        """End every lease."""
        with self._lock:
            self._leases.release_all()

    def _remember(self, lease_id: str, lease: _Lease) -> None:
        self._ended_fences[lease_id] = lease.fence
        while len(self._ended_fences) > MAX_ENDED:
            self._ended_fences.popitem(last=False)
