"""The table in which a serving agent publishes its leases for receivers to read over the fabric.

A read of remote memory does not show whether that memory still held the right blocks: clocks of two hosts
cannot be compared, and a request to the serving process would wait for its engine step. So a lease is a word
in registered memory, as in a sequence lock. A receiver reads the blocks first and the lease afterwards; the
sender removes the lease from the table before its blocks are reused. A lease that is live after the last byte
arrived was live while the bytes were read. No clocks are compared and no guard time is needed.

A lease may be granted again after it ended, on other blocks. Grants are numbered, so that a reader of blocks
of the first grant does not accept the second for it.

Layout: BUCKETS buckets of WAYS entries; an entry is digest (16 bytes), fence (8), state (8), number of the
grant (8), offset and bytes of the lease's page (4 + 4, see pages.py; 0 bytes: no page), little-endian. A
lease's bucket follows from its digest, so that the sides need not agree on a slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.leases import LeaseState

BUCKETS = 512
WAYS = 16
ENTRY = np.dtype(
    [
        ("digest", "S16"),
        ("fence", "<u8"),
        ("state", "<u8"),
        ("grant", "<u8"),
        ("page_offset", "<u4"),
        ("page_bytes", "<u4"),
    ]
)
BUCKET_BYTES = WAYS * ENTRY.itemsize
TABLE_BYTES = BUCKETS * BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the memory that holds lease pages."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table's entry for a lease. `grant` numbers the grants of its table."""

    state: LeaseState
    grant: int = 0
    page: Extent | None = None


def digest(lease_id: str) -> bytes:
    """Return 16 bytes that identify a lease; the last is odd, since numpy strips trailing zero bytes."""
    raw = hashlib.sha256(lease_id.encode()).digest()[:16]
    return raw[:15] + bytes([raw[15] | 1])


def bucket_offset(lease_id: str) -> int:
    """Return the byte offset of a lease's bucket."""
    return int.from_bytes(digest(lease_id)[:4], "little") % BUCKETS * BUCKET_BYTES


def look_up(bucket: bytes, lease_id: str, fence: int) -> TableEntry:
    """Return the entry of a lease in a bucket read from a table."""
    entries = np.frombuffer(bucket, dtype=ENTRY)
    wanted = digest(lease_id)
    for entry in entries:
        if entry["digest"] == wanted and entry["state"]:
            if int(entry["fence"]) != fence:
                return TableEntry(LeaseState.FENCED)
            size = int(entry["page_bytes"])
            page = Extent(int(entry["page_offset"]), size) if size else None
            return TableEntry(LeaseState(int(entry["state"])), int(entry["grant"]), page)
    return TableEntry(LeaseState.ABSENT)


class NixlLeaseTable:
    """The serving side's table. An ended lease leaves a tombstone until its entry is needed."""

    def __init__(self) -> None:
        self._entries: npt.NDArray[Any] = np.zeros(BUCKETS * WAYS, dtype=ENTRY)
        self._grants = 0

    @property
    def address(self) -> int:
        """Address of TABLE_BYTES bytes to register."""
        return int(self._entries.ctypes.data)

    def grant(self, lease_id: str, fence: int, page: Extent | None = None) -> None:
        """Publish a live lease. Raise TransferError if its bucket is full of live leases."""
        index = self._place(lease_id)
        entry = self._entries[index : index + 1]
        entry["state"] = LeaseState.ABSENT
        entry["digest"] = digest(lease_id)
        entry["fence"] = fence
        self._grants += 1
        entry["grant"] = self._grants
        entry["page_offset"], entry["page_bytes"] = (page.offset, page.size) if page else (0, 0)
        entry["state"] = LeaseState.LIVE

    def end(self, lease_id: str) -> None:
        """Mark a lease as ended. A receiver discards what it read under a lease that ended."""
        wanted = digest(lease_id)
        for index in self._ways(lease_id):
            if self._entries["digest"][index] == wanted:
                self._entries["state"][index] = LeaseState.ENDED

    def _place(self, lease_id: str) -> int:
        wanted = digest(lease_id)
        free = [i for i in self._ways(lease_id) if self._entries["state"][i] != LeaseState.LIVE]
        if not free:
            raise TransferError("the lease table has no room: too many leases are live")
        for index in free:
            if self._entries["digest"][index] == wanted:
                return index
        return min(free, key=lambda index: int(self._entries["grant"][index]))

    @staticmethod
    def _ways(lease_id: str) -> Iterator[int]:
        first = bucket_offset(lease_id) // ENTRY.itemsize
        return iter(range(first, first + WAYS))
