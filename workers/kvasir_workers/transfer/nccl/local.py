"""State that the threads of one agent share: its KV, and the means to move it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir_workers.transfer.common.checksums import BlockSums
from kvasir_workers.transfer.common.memory import CHUNK_BYTES, Memory
from kvasir_workers.transfer.common.pulls import KvShape
from kvasir_workers.transfer.nccl.group import Fabric

SLOTS = 3
"""Chunks in flight per connection, on each side."""
HOST_BATCH_BYTES = 16 << 20
"""Size of a batch of blocks in host memory, which is one chunk."""
SUMMED_BYTES = 4 << 20
"""Size of what a sender sums before it can send it, while it sums the next."""
BATCH_BYTES = 16 << 20
BATCH_REGION_BYTES = 4 << 20
"""The same on a GPU: enough for long stretches of each region, and small enough that one batch is summed
while the next is received."""
MAX_BATCH_BLOCKS = 1024
MAX_TAG = 1 << 16


@dataclass(frozen=True, slots=True)
class Local:
    """One agent. `device` is "cpu" or "cuda". `sums` sums pulled blocks, for comparison if `compares`. `now`
    reads a clock in seconds, from any thread."""

    host: str
    device: str
    shape: KvShape
    memory: Memory
    sums: BlockSums
    compares: bool
    fabric: Fabric
    now: Callable[[], float]

    @property
    def slot_bytes(self) -> int:
        """Bytes of the staging buffer of one chunk. In host memory, only chunks of ended pulls are staged."""
        if self.device == "cpu":
            return max(HOST_BATCH_BYTES, sum(self.shape.block_bytes))
        return max(CHUNK_BYTES, *self.shape.block_bytes)


def batch_blocks(size: int, regions: int, device: str) -> int:
    """Return how many blocks of `size` bytes over all regions on a device make one batch."""
    wanted = HOST_BATCH_BYTES if device == "cpu" else max(BATCH_BYTES, regions * BATCH_REGION_BYTES)
    return min(MAX_BATCH_BLOCKS, max(1, wanted // size))


def summed_blocks(size: int, regions: int, device: str) -> int:
    """Return how many blocks are summed at once; those of a GPU as a batch."""
    return max(1, SUMMED_BYTES // size) if device == "cpu" else batch_blocks(size, regions, device)


def tag(chunks: int) -> int:
    """Return the process group's tag of the chunk that follows `chunks` others of its connection."""
    return 1 + chunks % MAX_TAG
