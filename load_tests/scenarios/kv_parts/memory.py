"""KV in an engine's memory, in the measured shapes: total size, piece size, and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

import numpy as np

from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion

MIB = 1 << 20
KIB = 1 << 10
LARGE_LAYERS = 2
SMALL_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Case:
    """`total` bytes in pieces of `piece`, one per block in each of `layers` layers. `scattered`: no two
    consecutive blocks of the prompt are adjacent in memory; otherwise all are."""

    total: int
    piece: int
    layers: int
    scattered: bool = False

    @property
    def name(self) -> str:
        """The case's name in row names."""
        if self.layers == LARGE_LAYERS:
            return f"{self.total // MIB} MiB"
        where = "scattered" if self.scattered else "neighbours"
        return f"{self.total // MIB} MiB in {self.piece // KIB} KiB pieces, {where}"

    @property
    def small(self) -> bool:
        """Whether the case has many pieces."""
        return self.layers != LARGE_LAYERS

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        return self.piece * self.layers

    @property
    def blocks(self) -> int:
        """Number of blocks that are moved."""
        return self.total // self.block_bytes

    @property
    def pool(self) -> int:
        """Number of blocks in memory."""
        return 2 * self.blocks if self.scattered else self.blocks

    def ids(self, seed: int) -> list[int]:
        """Block ids in the prompt's order."""
        if not self.scattered:
            return list(range(self.blocks))
        found = list(range(0, self.pool, 2))
        Random(seed).shuffle(found)
        return found


Run = tuple[int, int, int]
"""Runs of blocks: source block, target block, and length on both sides."""


def runs_of(sources: Sequence[int], targets: Sequence[int], longest: int) -> list[Run]:
    """Merge blocks that are adjacent on both sides, up to `longest` blocks."""
    found: list[Run] = []
    for source, target in zip(sources, targets, strict=True):
        if found:
            first, to, count = found[-1]
            if (source, target) == (first + count, to + count) and count < longest:
                found[-1] = (first, to, count + 1)
                continue
        found.append((source, target, 1))
    return found


def cases(scale: int = 1) -> list[Case]:
    """All shapes, with their totals divided by `scale`."""
    large = [Case(max(2, size // scale) * MIB, MIB, LARGE_LAYERS) for size in (2, 32, 256)]
    small = [
        Case(32 * MIB // scale, piece * KIB, SMALL_LAYERS, scattered)
        for piece in (16, 64)
        for scattered in (False, True)
    ]
    return large + small


class Memory:
    """One process's KV of a case. All of its pages are touched at the start. `seed` None: zeroes."""

    def __init__(self, case: Case, seed: int | None) -> None:
        self.case = case
        shape = (case.layers, case.pool * case.piece // 8)
        if seed is None:
            self.layers = np.full(shape, 0, dtype=np.uint64)
        else:
            self.layers = np.random.default_rng(seed).integers(0, 1 << 63, shape, dtype=np.uint64)
        self.regions = [KvRegion(int(layer.ctypes.data), case.piece, case.pool) for layer in self.layers]
        self.layout = KvLayout(16, "float32", "LBHNC", case.layers, 1, 64, case.block_bytes)

    def digest(self, blocks: Sequence[int]) -> str:
        """Checksum of these blocks' bytes, in this order."""
        found = blake2b()
        by_block = self.layers.view(np.uint8).reshape(self.case.layers, self.case.pool, self.case.piece)
        for block in blocks:
            found.update(by_block[:, block].tobytes())
        return found.hexdigest()
