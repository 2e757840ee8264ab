"""Lease pages: the blocks that each lease covers, in memory that receivers read over the fabric.

A receiver that starts before the sender has computed everything needs the ids of blocks completed after its
ticket was written, and a receiver that verifies what it read needs their checksums. The lease's page has
both: the number of complete blocks and of all blocks, the ids, and a checksum for each part of each block.

A page may be read while it is written, without any ordering. So it carries a checksum of itself: a page that
was read half updated fails verification and is read again. The page of a lease that ended and whose memory
was reused fails too, because the page includes the lease's digest and fence.

Layout, little-endian: checksum of all that follows (8 bytes), digest (16), fence (8), total blocks, complete
blocks, parts (4 + 4 + 4), 4 unused; block ids (4 each, padded to 8 bytes); then the checksums (8 each),
grouped by block.
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
    """A page that was read: ids and checksums of the complete blocks, the first of `total`."""

    total: int
    ids: tuple[int, ...]
    sums: Sums


class PageMemory:
    """Registered memory of fixed size, allocated in extents, first fit."""

    def __init__(self, size: int) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.zeros(size // _UNIT * _UNIT, dtype=np.uint8)
        self._free = [(0, len(self.bytes))] if len(self.bytes) else []

    @property
    def address(self) -> int:
        """Address of the memory to register."""
        return int(self.bytes.ctypes.data)

    def take(self, size: int) -> Extent | None:
        """Allocate an extent of `size` bytes; None if there is no room."""
        whole = -(-size // _UNIT) * _UNIT
        for index, (offset, length) in enumerate(self._free):
            if length >= whole:
                rest = (offset + whole, length - whole)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return Extent(offset, size)
        return None

    def give(self, extent: Extent) -> None:
        """Free an extent."""
        insort(self._free, (extent.offset, -(-extent.size // _UNIT) * _UNIT))
        joined: list[tuple[int, int]] = []
        for offset, length in self._free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._free = joined

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Return the extent's bytes, not copied."""
        return self.bytes[extent.offset : extent.offset + extent.size]


def page_bytes(total: int, parts: int) -> int:
    """Return the size of a page for a lease on `total` blocks."""
    return _sums_at(total) + _SUM_BYTES * total * parts


def memory_bytes(blocks: int, parts: int) -> int:
    """Return the page memory for an agent with `blocks` blocks: enough for every block in two leases (prompts
    share blocks), and for many short leases."""
    return (1 << 20) + 2 * page_bytes(blocks, max(1, parts))


class PageWriter:
    """One lease's page in `memory`, written by the sender."""

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
        """Add complete blocks. Raise ValueError for more blocks than the lease has."""
        after = self.complete + len(ids)
        if after > self._total:
            raise ValueError(f"{after} blocks exceed the lease's {self._total}")
        self._ids[self.complete : after] = ids
        self._sums[self.complete : after] = sums
        self.complete = after
        header = _HEADER.pack(self._digest, self._fence, self._total, after, self._parts, 0)
        self._memory[_SUM_BYTES:_IDS] = np.frombuffer(header, dtype=np.uint8)
        self._memory[:_SUM_BYTES].view("<u8")[0] = _sum(self._memory)


def parse(memory: npt.NDArray[np.uint8], lease_id: str, fence: int) -> Page | None:
    """Return a page that was read into `memory`; None if its checksum does not match or it is another
    lease's."""
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
