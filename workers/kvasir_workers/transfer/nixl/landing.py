"""Targets of reads: the blocks themselves, or staging memory from which they are copied to the blocks.

A read that its sender has to answer ends when the sender answers, and cannot be cancelled (see receiving.py).
With staging, a late answer is written to a slot reserved for it, and not to a block that may have been
reused. Each sender has a limited share of the slots, so that senders that hang do not block the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion
from kvasir_workers.transfer.nixl.agent import Descriptor, device_ordinal

BATCH_BYTES = 8 << 20
"""Approximate size of one read."""
SLOTS = 32
PEER_SLOTS = 8


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """Target of a read: `part` of the blocks `targets` of `regions`; the regions are all of `slot`."""

    slot: int
    regions: Sequence[KvRegion]
    targets: Sequence[int]
    part: BlockPart


class Landing(Protocol):
    """Read targets of one agent. `slots` is how many reads of ended pulls may continue; with 0, a target is
    free only when its read has ended."""

    slots: int

    def memory(self) -> list[Descriptor]:
        """Return the memory to register."""
        ...

    def take(self, peer: str, targets: Sequence[int], part: BlockPart) -> ReadTarget | None:
        """Return a target for a read from `peer` of `part` of these blocks; None if there is none."""
        ...

    def give(self, place: ReadTarget) -> None:
        """Return a target to which nothing writes any more."""
        ...

    def copy_on(self, place: ReadTarget, targets: Sequence[int], part: BlockPart) -> Future[None]:
        """Start to copy what was read to the blocks for which `take` returned the target."""
        ...

    def close(self) -> None:
        """Return when no copy runs. Idempotent."""
        ...


class DirectLanding:
    """See Landing: reads go into the blocks themselves."""

    slots = 0

    def __init__(self, regions: Sequence[KvRegion]) -> None:
        self._regions = tuple(regions)

    def memory(self) -> list[Descriptor]:
        """See Landing."""
        return [(r.address, r.blocks * r.block_bytes, device_ordinal(r.device)) for r in self._regions]

    def take(self, peer: str, targets: Sequence[int], part: BlockPart) -> ReadTarget:
        """See Landing."""
        return ReadTarget(0, self._regions, targets, part)

    def give(self, place: ReadTarget) -> None:
        """See Landing."""

    def copy_on(self, place: ReadTarget, targets: Sequence[int], part: BlockPart) -> Future[None]:
        """See Landing."""
        return _done()

    def close(self) -> None:
        """See Landing."""


class StagedLanding:
    """See Landing: reads go into slots of one batch each, on the device of the regions. Host memory is
    allocated as slots are first used."""

    slots = SLOTS

    def __init__(self, regions: Sequence[KvRegion]) -> None:
        # Imports torch, which DirectLanding does not need.
        from kvasir_workers.transfer.common.memory import memory_of

        self._regions = tuple(regions)
        self._kv = memory_of(regions)
        self._slot_bytes = max(BATCH_BYTES, sum(region.block_bytes for region in regions))
        self._bytes = self._kv.staging(SLOTS * self._slot_bytes)
        self._address = int(self._bytes.data_ptr())
        self._free = list(range(SLOTS))
        self._owners: dict[int, str] = {}
        self._held: Counter[str] = Counter()
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="kv-staging")

    def memory(self) -> list[Descriptor]:
        """See Landing."""
        return [(self._address, SLOTS * self._slot_bytes, device_ordinal(self._regions[0].device))]

    def take(self, peer: str, targets: Sequence[int], part: BlockPart) -> ReadTarget | None:
        """See Landing."""
        if not self._free or self._held[peer] >= PEER_SLOTS:
            return None
        slot = self._free.pop()
        self._owners[slot] = peer
        self._held[peer] += 1
        regions = []
        address = self._address + slot * self._slot_bytes
        for region in self._regions:
            piece = region.block_bytes // part.of
            regions.append(KvRegion(address, piece, len(targets), region.device))
            address += len(targets) * piece
        return ReadTarget(slot, regions, range(len(targets)), UNSHARDED)

    def give(self, place: ReadTarget) -> None:
        """See Landing."""
        peer = self._owners.pop(place.slot)
        self._held -= Counter({peer: 1})
        self._free.append(place.slot)

    def copy_on(self, place: ReadTarget, targets: Sequence[int], part: BlockPart) -> Future[None]:
        """See Landing."""
        if self._regions[0].device != "cpu":
            return self._copying.submit(self._copy, place, targets, part)
        # A thread would wait for the GIL longer than the copy takes.
        self._copy(place, targets, part)
        return _done()

    def close(self) -> None:
        """See Landing."""
        self._copying.shutdown(wait=True, cancel_futures=True)

    def _copy(self, place: ReadTarget, targets: Sequence[int], part: BlockPart) -> None:
        batch = self._kv.batch(targets, part)
        row = (0, batch.pieces)
        first = place.slot * self._slot_bytes
        batch.scatter(self._bytes[first : first + batch.size(row)], row)


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done
