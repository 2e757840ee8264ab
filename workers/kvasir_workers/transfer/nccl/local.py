"""What the threads of one agent share: its KV, and the means to move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import BlockPart
from kvasir_workers.transfer.checksums import BlockSums
from kvasir_workers.transfer.memory import CHUNK_BYTES, Memory
from kvasir_workers.transfer.nccl.group import Fabric

SLOTS = 3
"""Chunks of one connection that are under way at once, on each side."""
BATCH_BYTES = 16 << 20
BATCH_REGION_BYTES = 4 << 20
"""Blocks that travel as one batch: enough for long stretches of each region, and few enough that one batch is
summed while the next comes."""
MAX_BATCH_BLOCKS = 1024
MAX_TAG = 1 << 16


@dataclass(frozen=True, slots=True)
class Local:
    """One agent. `device` is "cpu" or "cuda"; `block_bytes` is one number per region, and each has `blocks`
    blocks. `sums` sums what was pulled, for comparison where `compares`. `now` reads a clock in seconds, from
    any thread."""

    host: str
    device: str
    layout: KvLayout
    block_bytes: tuple[int, ...]
    blocks: int
    memory: Memory
    sums: BlockSums
    compares: bool
    fabric: Fabric
    now: Callable[[], float]

    @property
    def slot_bytes(self) -> int:
        """Staging of one chunk."""
        return max(CHUNK_BYTES, *self.block_bytes)

    def require(self, blocks: Sequence[int]) -> None:
        """Raises TransferError for a block that there is none of."""
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.blocks:
            raise TransferError(f"a block lies outside the {self.blocks} of the registered memory")


def part_bytes(block_bytes: tuple[int, ...], part: BlockPart) -> list[int]:
    """Bytes of a part of a block in each region. Raises TransferError where there is no such part."""
    if not 0 <= part.index < part.of or any(size % part.of for size in block_bytes):
        raise TransferError(f"blocks of {sorted(set(block_bytes))} bytes have no {part}")
    return [size // part.of for size in block_bytes]


def batch_blocks(size: int, regions: int) -> int:
    """Blocks of `size` bytes over all regions that travel as one batch."""
    return min(MAX_BATCH_BLOCKS, max(1, max(BATCH_BYTES, regions * BATCH_REGION_BYTES) // size))


def tag(chunks: int) -> int:
    """What the process group calls the chunk that comes after `chunks` others of its connection."""
    return 1 + chunks % MAX_TAG
