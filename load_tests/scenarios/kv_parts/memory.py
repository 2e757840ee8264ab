"""KV as an engine has it, in the shapes that are measured: how much, in pieces of which size, lying where."""

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
    """`total` bytes in pieces of `piece`, one of each block in each of `layers` layers. `scattered`: no two
    blocks that follow each other in the prompt are neighbours; else all are."""

    total: int
    piece: int
    layers: int
    scattered: bool = False

    @property
    def name(self) -> str:
        """As rows call it."""
        if self.layers == LARGE_LAYERS:
            return f"{self.total // MIB} MiB"
        where = "scattered" if self.scattered else "neighbours"
        return f"{self.total // MIB} MiB in {self.piece // KIB} KiB pieces, {where}"

    @property
    def small(self) -> bool:
        """Whether it is about many pieces."""
        return self.layers != LARGE_LAYERS

    @property
    def block_bytes(self) -> int:
        """A block over all layers."""
        return self.piece * self.layers

    @property
    def blocks(self) -> int:
        """How many blocks are moved."""
        return self.total // self.block_bytes

    @property
    def pool(self) -> int:
        """How many blocks there are."""
        return 2 * self.blocks if self.scattered else self.blocks

    def ids(self, seed: int) -> list[int]:
        """Which blocks, in the prompt's order."""
        if not self.scattered:
            return list(range(self.blocks))
        found = list(range(0, self.pool, 2))
        Random(seed).shuffle(found)
        return found


Run = tuple[int, int, int]
"""Source block, target block, and how many from there on, on both sides."""


def runs_of(sources: Sequence[int], targets: Sequence[int], longest: int) -> list[Run]:
    """Neighbours on both sides as one, up to `longest` blocks."""
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
    """All shapes; their totals divided by `scale`."""
    large = [Case(max(2, size // scale) * MIB, MIB, LARGE_LAYERS) for size in (2, 32, 256)]
    small = [
        Case(32 * MIB // scale, piece * KIB, SMALL_LAYERS, scattered)
        for piece in (16, 64)
        for scattered in (False, True)
    ]
    return large + small


class Memory:
    """One process's KV of a case. Every page of it is there from the start. `seed` None: zeroes."""

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
        """Of the bytes of these blocks, in this order."""
        found = blake2b()
        by_block = self.layers.view(np.uint8).reshape(self.case.layers, self.case.pool, self.case.piece)
        for block in blocks:
            found.update(by_block[:, block].tobytes())
        return found.hexdigest()
