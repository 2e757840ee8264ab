"""Lease pages: beside the lease table, what each lease covers, for receivers to read over the fabric.

A receiver that comes before the sender has computed everything needs the ids of blocks that were complete
only after its ticket was written, and one that checks what it read needs their sums. Both are in the lease's
page: how many blocks are complete of how many, their ids, and a sum for each part of each.

A page grows while it is read, and nothing orders the two. So it carries a sum of itself: one that was read
half old and half new does not add up, and is read again. Nor does one of a lease that ended and whose place
was given away, since the lease's digest and fence are within.

Layout, little-endian: sum of all that follows (8 bytes), digest (16), fence (8), blocks in all, blocks that
are complete, parts (4 + 4 + 4), 4 unused; block ids (4 each, filled up to 8 bytes); then the sums (8 each),
those of one block together.
"""

from __future__ import annotations

import struct
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvasir.native import checksum_pieces
from kvasir_workers.transfer.common.checksums import Sums
from kvasir_workers.transfer.nixl.leases import Extent, digest

_HEADER = struct.Struct("<16sQIIII")
_SUM_BYTES = 8
_IDS = _SUM_BYTES + _HEADER.size
_UNIT = 64
MAX_PAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it was read: the ids and sums of the blocks that are complete, the first of `total`."""

    total: int
    ids: tuple[int, ...]
    sums: Sums


class PageMemory:
    """Registered memory of a bounded number of bytes, given out in extents: the first that fits."""

    def __init__(self, size: int) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.zeros(size // _UNIT * _UNIT, dtype=np.uint8)
        self._free = [(0, len(self.bytes))] if len(self.bytes) else []

    @property
    def address(self) -> int:
        """Where the memory is to be registered."""
        return int(self.bytes.ctypes.data)

    def take(self, size: int) -> Extent | None:
        """An extent of so many bytes, or None where no room is left."""
        whole = -(-size // _UNIT) * _UNIT
        for index, (offset, length) in enumerate(self._free):
            if length >= whole:
                rest = (offset + whole, length - whole)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return Extent(offset, size)
        return None

    def give(self, extent: Extent) -> None:
        """Take an extent back."""
        insort(self._free, (extent.offset, -(-extent.size // _UNIT) * _UNIT))
        joined: list[tuple[int, int]] = []
        for offset, length in self._free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._free = joined

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """The extent's bytes, not copied."""
        return self.bytes[extent.offset : extent.offset + extent.size]


def page_bytes(total: int, parts: int) -> int:
    """The size of a page for a lease on so many blocks."""
    return _sums_at(total) + _SUM_BYTES * total * parts


def memory_bytes(blocks: int, parts: int) -> int:
    """Page memory for an agent with so many blocks: every block on lease twice over, as blocks that prompts
    share are, and room for many short leases."""
    return (1 << 20) + 2 * page_bytes(blocks, max(1, parts))


class PageWriter:
    """One lease's page in `memory`, written by the side that offers."""

    def __init__(
        self, memory: npt.NDArray[np.uint8], lease_id: str, fence: int, total: int, parts: int
    ) -> None:
        self._memory = memory
        self._digest, self._fence, self._total, self._parts = digest(lease_id), fence, total, parts
        sums_at = _sums_at(total)
        self._ids = memory[_IDS : _IDS + 4 * total].view("<u4")
        self._sums = memory[sums_at : sums_at + _SUM_BYTES * total * parts].view("<u8").reshape(total, parts)
        self.complete = 0
        self.add((), np.zeros((0, parts), dtype=np.uint64))

    def add(self, ids: Sequence[int], sums: Sums) -> None:
        """Tell of further blocks that are complete. Raises ValueError for more than the lease has."""
        after = self.complete + len(ids)
        if after > self._total:
            raise ValueError(f"{after} blocks are more than the {self._total} which the lease has")
        self._ids[self.complete : after] = ids
        self._sums[self.complete : after] = sums
        self.complete = after
        header = _HEADER.pack(self._digest, self._fence, self._total, after, self._parts, 0)
        self._memory[_SUM_BYTES:_IDS] = np.frombuffer(header, dtype=np.uint8)
        self._memory[:_SUM_BYTES].view("<u8")[0] = _sum(self._memory)


def parse(memory: npt.NDArray[np.uint8], lease_id: str, fence: int) -> Page | None:
    """A page that was read into `memory`; None for one that does not add up or is another lease's."""
    if len(memory) < _IDS or int(memory[:_SUM_BYTES].view("<u8")[0]) != _sum(memory):
        return None
    found, holder, total, complete, parts, _ = _HEADER.unpack(memory[_SUM_BYTES:_IDS].tobytes())
    if found != digest(lease_id) or holder != fence:
        return None
    if complete > total or page_bytes(total, parts) != len(memory):
        return None
    sums_at = _sums_at(total)
    sums = memory[sums_at : sums_at + _SUM_BYTES * complete * parts].view("<u8").reshape(complete, parts)
    return Page(total, tuple(memory[_IDS : _IDS + 4 * complete].view("<u4").tolist()), sums.copy())


def _sums_at(total: int) -> int:
    return _IDS + -(-total // 2) * 8


def _sum(memory: npt.NDArray[np.uint8]) -> int:
    address = np.array([memory.ctypes.data + _SUM_BYTES], dtype=np.uint64)
    length = np.array([len(memory) - _SUM_BYTES], dtype=np.uint64)
    return checksum_pieces(address.data, length.data, 1)[0]
