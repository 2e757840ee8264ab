"""Blocks of an agent's KV as a row of bytes, for what moves rows: a process group, a read into staging.

A batch of blocks is a row of pieces: all its blocks' parts of the first region, then of the second, and so
on. A chunk is a stretch of that row. Where it is one stretch of memory too, as neighbouring blocks are, it
goes from and to the KV itself; otherwise by way of a staging buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvasir.native import copy_pieces
from kvasir.ports.transfer import BlockPart, KvRegion

CHUNK_BYTES = 4 << 20
"""Chunks are at most so long, or one piece where that is longer."""
DIRECT_BYTES = 512 << 10
"""A stretch of neighbouring blocks from here on makes chunks of its own; shorter ones are put together."""

Stretch = tuple[int, int]
"""Pieces of a batch's row, from the first number up to the second, which is not included."""


class CopyBatch(Protocol):
    """The pieces of some blocks. Copies are whole when they return, and may run in any thread."""

    @property
    def pieces(self) -> int:
        """How many there are."""
        ...

    def chunks(self) -> list[Stretch]:
        """All pieces, in stretches that suit this side to send."""
        ...

    def size(self, stretch: Stretch) -> int:
        """Bytes."""
        ...

    def direct(self, stretch: Stretch) -> Any | None:
        """The KV itself as a uint8 tensor, where the stretch may be sent or received without staging."""
        ...

    def gather(self, stretch: Stretch, staging: Any) -> None:
        """Copy into a uint8 tensor that is exactly as long."""
        ...

    def scatter(self, staging: Any, stretch: Stretch) -> None:
        """The inverse of `gather`."""
        ...


class Memory(Protocol):
    """One rank's KV."""

    def batch(self, blocks: Sequence[int], part: BlockPart) -> CopyBatch:
        """The pieces of `part` of these blocks."""
        ...

    def staging(self, size: int) -> Any:
        """A uint8 tensor of `size` bytes on the device of the KV."""
        ...


class HostKvMemory:
    """Memory of the CPU."""

    def __init__(self, regions: Sequence[KvRegion]) -> None:
        self._bases = np.array([region.address for region in regions], dtype=np.uint64)
        self._strides = np.array([region.block_bytes for region in regions], dtype=np.uint64)

    def batch(self, blocks: Sequence[int], part: BlockPart) -> CopyBatch:
        """See Memory."""
        lengths = self._strides // np.uint64(part.of)
        starts = (self._bases + lengths * np.uint64(part.index))[:, None]
        at = starts + self._strides[:, None] * np.asarray(blocks, dtype=np.uint64)[None, :]
        return HostBatch(at.ravel(), np.repeat(lengths, len(blocks)))

    def staging(self, size: int) -> Any:
        """See Memory."""
        return torch.empty(size, dtype=torch.uint8)


class HostBatch:
    """Pieces by address and length."""

    def __init__(self, at: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> None:
        self._at = at
        self._lengths = lengths
        self._ends = row_ends(lengths)
        self._breaks = np.flatnonzero(at[1:] != at[:-1] + lengths[:-1]) + 1

    @property
    def pieces(self) -> int:
        """See Batch."""
        return len(self._at)

    def chunks(self) -> list[Stretch]:
        """See Batch."""
        return cut(self._ends, [0, *self._breaks.tolist(), self.pieces])

    def size(self, stretch: Stretch) -> int:
        """See Batch."""
        return int(self._ends[stretch[1]] - self._ends[stretch[0]])

    def direct(self, stretch: Stretch) -> Any | None:
        """See Batch."""
        start, stop = stretch
        following = int(np.searchsorted(self._breaks, start, side="right"))
        if following < len(self._breaks) and self._breaks[following] < stop:
            return None
        memory = (ctypes.c_uint8 * self.size(stretch)).from_address(int(self._at[start]))
        return torch.frombuffer(memory, dtype=torch.uint8)

    def gather(self, stretch: Stretch, staging: Any) -> None:
        """See Batch."""
        kv, lengths = self._pieces(stretch)
        copy_pieces(kv.data, self._staged(stretch, staging).data, lengths.data)

    def scatter(self, staging: Any, stretch: Stretch) -> None:
        """See Batch."""
        kv, lengths = self._pieces(stretch)
        copy_pieces(self._staged(stretch, staging).data, kv.data, lengths.data)

    def _pieces(self, stretch: Stretch) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        start, stop = stretch
        return self._at[start:stop], self._lengths[start:stop]

    def _staged(self, stretch: Stretch, staging: Any) -> npt.NDArray[np.uint64]:
        start, stop = stretch
        staged = np.uint64(staging.data_ptr()) + (self._ends[start:stop] - self._ends[start])
        return np.asarray(staged, dtype=np.uint64)


def row_ends(lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Where each piece begins within the row, and where the last one ends."""
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(lengths, dtype=np.uint64)))


def cut(ends: npt.NDArray[np.uint64], bounds: Sequence[int]) -> list[Stretch]:
    """A row in chunks. `bounds` are the pieces before which memory breaks off, and the row's two ends."""
    chunks: list[Stretch] = []
    start = 0
    for first, last in pairwise(bounds):
        if ends[last] - ends[first] >= DIRECT_BYTES:
            if start < first:
                chunks.append((start, first))
                start = first
            while start < last:
                start = _cut_one(chunks, ends, start, last)
        else:
            while ends[last] - ends[start] > CHUNK_BYTES:
                start = _cut_one(chunks, ends, start, last)
    if start < bounds[-1]:
        chunks.append((start, bounds[-1]))
    return chunks


def _cut_one(chunks: list[Stretch], ends: npt.NDArray[np.uint64], start: int, last: int) -> int:
    room = int(np.searchsorted(ends, ends[start] + np.uint64(CHUNK_BYTES), side="right")) - 1
    stop = max(start + 1, min(last, room))
    chunks.append((start, stop))
    return stop


def memory_of(regions: Sequence[KvRegion]) -> Memory:
    """Memory for where the regions lie, which is one device."""
    if regions[0].device == "cpu":
        return HostKvMemory(regions)
    from kvasir_workers.transfer.common.cuda_memory import CudaMemory  # starts CUDA

    return CudaMemory(regions)
