"""Checksums of KV blocks, with which a receiver verifies that it received what the sender holds.

A block's sum covers all its layers. It is taken in parts where tensor-parallel ranks of another size each
read some of its KV heads. Summing takes about as long as copying, so all but small sums are taken outside the
step loop: on a thread for host memory, on a separate stream for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvasir.core.errors import TransferError
from kvasir.native import checksum_pieces
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion

LANE_BYTES = 4
INLINE_BYTES = 2 << 20

Sums = npt.NDArray[np.uint64]
"""One row per block, one column per part of the block."""

PendingSums = Future[Sums]
"""Sums in progress. Callbacks may run on another thread."""


class BlockSums(Protocol):
    """Checksums over the blocks of one rank's KV."""

    def begin(self, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED) -> PendingSums:
        """Start to sum `part` of each block, cut into `parts` equal pieces of each layer. With 0 parts it
        takes no sums, but completes only when everything computed before the call is in memory."""
        ...

    def close(self) -> None:
        """Return when no thread reads KV memory. Idempotent."""
        ...


def known(sums: Sums) -> PendingSums:
    """Return sums that are already complete."""
    found: PendingSums = Future()
    found.set_result(sums)
    return found


class HostSums:
    """BlockSums over host memory. Up to INLINE_BYTES are summed in the call, more on one thread, unless the
    caller `waits` for them in any case."""

    def __init__(self, regions: Sequence[KvRegion], *, waits: bool = False) -> None:
        self._waits = waits
        self._bases = np.array([region.address for region in regions], dtype=np.uint64)
        self._strides = np.array([region.block_bytes for region in regions], dtype=np.uint64)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-sums")

    def begin(self, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED) -> PendingSums:
        """See BlockSums."""
        if not parts or not blocks:
            return known(np.zeros((len(blocks), parts), dtype=np.uint64))
        if self._waits or len(blocks) * int(self._strides.sum()) // part.of <= INLINE_BYTES:
            return known(self._sum(blocks, parts, part))
        return self._executor.submit(self._sum, tuple(blocks), parts, part)

    def close(self) -> None:
        """See BlockSums."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _sum(self, blocks: Sequence[int], parts: int, part: BlockPart) -> Sums:
        lengths = self._strides // np.uint64(part.of)
        starts = self._bases + lengths * np.uint64(part.index)
        piece = lengths // np.uint64(parts)
        at = (
            np.asarray(blocks, dtype=np.uint64)[:, None, None] * self._strides
            + starts
            + np.arange(parts, dtype=np.uint64)[None, :, None] * piece
        )
        sizes = np.tile(piece, len(blocks) * parts)
        sums = checksum_pieces(at.ravel().data, sizes.data, len(self._bases))
        return np.frombuffer(sums, dtype=np.uint64).reshape(len(blocks), parts)


def block_sums(regions: Sequence[KvRegion], *, after_compute: bool, waits: bool = False) -> BlockSums:
    """Return BlockSums for the device of the regions. `after_compute`: on a GPU, first wait for the work
    queued on the calling thread's stream; required for offered blocks, not for pulled ones. `waits`: sums of
    host memory are made in the call."""
    if regions[0].device == "cpu":
        return HostSums(regions, waits=waits)
    from kvasir_workers.transfer.common.cuda_sums import CudaSums  # imports torch

    return CudaSums(regions, after_compute=after_compute)


def require_parts(regions: Sequence[KvRegion], parts: int) -> None:
    """Raise TransferError if blocks cannot be summed in that many parts."""
    odd = [region.block_bytes for region in regions if region.block_bytes % (LANE_BYTES * max(1, parts))]
    if odd:
        raise TransferError(
            f"blocks of {odd[0]} bytes cannot be summed in {parts} parts of {LANE_BYTES}-byte lanes; "
            "set transfer.checksum to false"
        )


def describe_difference(mine: Sums, theirs: Sums, name: Callable[[int], str]) -> str:
    """Return a description of the first difference between the sums of received and sent blocks, "" if there
    is none. `name` names the block of a row."""
    differ = first_difference(mine, theirs)
    if differ is None:
        return ""
    row, found, sent = differ
    return f"{name(row)}, sums up to {found:016x}, and {sent:016x} was sent"


def first_difference(mine: Sums, theirs: Sums) -> tuple[int, int, int] | None:
    """Return the first row in which the sums differ, with that row's two sums; None if they are equal."""
    differ = np.argwhere(mine != theirs)
    if not len(differ):
        return None
    row, column = (int(index) for index in differ[0])
    return row, int(mine[row, column]), int(theirs[row, column])
