"""KV blocks as a sequence of bytes, for transports that move contiguous buffers: a process group, a read into
staging.

A batch of blocks is a sequence of pieces: the parts of all its blocks in the first region, then in the
second, and so on. A chunk is a range of that sequence. Host memory is sent from and received into where it
is; memory of GPUs goes through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvasir.native import copy_pieces
from kvasir.ports.transfer import BlockPart, KvRegion
from kvasir_workers.transfer.common.checksums import Sums

CHUNK_BYTES = 4 << 20
"""Maximum size of a chunk; a single longer piece is one chunk."""
DIRECT_BYTES = 512 << 10
"""Contiguous ranges of at least this size form chunks of their own; shorter ones are combined."""

Words = npt.NDArray[np.uint64]

Stretch = tuple[int, int]
"""A range of pieces of a batch: first number, and end number (exclusive)."""


class CopyBatch(Protocol):
    """The pieces of some blocks. Copies are complete on return, and may run in any thread."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        ...

    def chunks(self) -> list[Stretch]:
        """Return all pieces, in ranges that this side can send efficiently."""
        ...

    def size(self, stretch: Stretch) -> int:
        """Return the size of a range in bytes."""
        ...

    def direct(self, stretch: Stretch) -> HostPieces | None:
        """Return the KV itself if the range can be sent or received without staging, else None."""
        ...

    def gather(self, stretch: Stretch, staging: Any) -> None:
        """Copy the range into a uint8 tensor of exactly its size."""
        ...

    def scatter(self, staging: Any, stretch: Stretch) -> None:
        """The inverse of `gather`."""
        ...


class Memory(Protocol):
    """One rank's KV."""

    def batch(self, blocks: Sequence[int], part: BlockPart) -> CopyBatch:
        """Return the pieces of `part` of these blocks."""
        ...

    def staging(self, size: int) -> Any:
        """Return a uint8 tensor of `size` bytes on the device of the KV."""
        ...


@dataclass(slots=True)
class HostPieces:
    """A range of a batch in host memory: pieces by address and length, grouped by region, `rows` in each
    region. A link that receives them sums each row in `parts`, if there are any, into `sums`."""

    at: Words
    lengths: Words
    rows: int
    parts: int = 0
    sums: Sums | None = None

    @classmethod
    def of(cls, tensor: Any) -> HostPieces:
        """Return the memory of a contiguous uint8 tensor, which must outlive them."""
        return cls(np.array([tensor.data_ptr()], np.uint64), np.array([tensor.numel()], np.uint64), 1)


class HostKvMemory:
    """Memory in host memory."""

    def __init__(self, regions: Sequence[KvRegion]) -> None:
        self._bases = np.array([region.address for region in regions], dtype=np.uint64)
        self._strides = np.array([region.block_bytes for region in regions], dtype=np.uint64)

    def batch(self, blocks: Sequence[int], part: BlockPart) -> CopyBatch:
        """See Memory."""
        lengths = self._strides // np.uint64(part.of)
        starts = (self._bases + lengths * np.uint64(part.index))[:, None]
        at = starts + self._strides[:, None] * np.asarray(blocks, dtype=np.uint64)[None, :]
        return HostBatch(at.ravel(), np.repeat(lengths, len(blocks)), len(blocks))

    def staging(self, size: int) -> Any:
        """See Memory."""
        return torch.empty(size, dtype=torch.uint8)


class HostBatch:
    """CopyBatch of pieces given by address and length, `rows` in each region."""

    def __init__(self, at: Words, lengths: Words, rows: int) -> None:
        self._at = at
        self._lengths = lengths
        self._rows = rows
        self._ends = row_ends(lengths)

    @property
    def pieces(self) -> int:
        """See CopyBatch."""
        return len(self._at)

    def chunks(self) -> list[Stretch]:
        """See CopyBatch."""
        return [(0, self.pieces)]

    def size(self, stretch: Stretch) -> int:
        """See CopyBatch."""
        return int(self._ends[stretch[1]] - self._ends[stretch[0]])

    def direct(self, stretch: Stretch) -> HostPieces:
        """See CopyBatch."""
        at, lengths = self._pieces(stretch)
        whole = stretch == (0, self.pieces)
        return HostPieces(at, lengths, self._rows if whole else len(at))

    def gather(self, stretch: Stretch, staging: Any) -> None:
        """See CopyBatch."""
        kv, lengths = self._pieces(stretch)
        copy_pieces(kv.data, self._staged(stretch, staging).data, lengths.data)

    def scatter(self, staging: Any, stretch: Stretch) -> None:
        """See CopyBatch."""
        kv, lengths = self._pieces(stretch)
        copy_pieces(self._staged(stretch, staging).data, kv.data, lengths.data)

    def _pieces(self, stretch: Stretch) -> tuple[Words, Words]:
        start, stop = stretch
        return self._at[start:stop], self._lengths[start:stop]

    def _staged(self, stretch: Stretch, staging: Any) -> Words:
        start, stop = stretch
        staged = np.uint64(staging.data_ptr()) + (self._ends[start:stop] - self._ends[start])
        return np.asarray(staged, dtype=np.uint64)


def row_ends(lengths: Words) -> Words:
    """Return the offset of each piece within the batch, followed by the batch's total size."""
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(lengths, dtype=np.uint64)))


def cut(ends: Words, bounds: Sequence[int]) -> list[Stretch]:
    """Return a batch's chunks. `bounds` are the numbers of the pieces before which memory is not contiguous,
    and the batch's two ends."""
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


def _cut_one(chunks: list[Stretch], ends: Words, start: int, last: int) -> int:
    room = int(np.searchsorted(ends, ends[start] + np.uint64(CHUNK_BYTES), side="right")) - 1
    stop = max(start + 1, min(last, room))
    chunks.append((start, stop))
    return stop


def memory_of(regions: Sequence[KvRegion]) -> Memory:
    """Return the Memory for the device of the regions, which must all be on one device."""
    if regions[0].device == "cpu":
        return HostKvMemory(regions)
    from kvasir_workers.transfer.common.cuda_memory import CudaMemory  # initializes CUDA

    return CudaMemory(regions)
