"""A sequence's part of paged KV: the blocks it holds, finds and caches."""

from __future__ import annotations

from kvasir.native.media_marks import mark_item
from kvasir.native.salt_places import mark_place
from kvasir_workers.engines.sim.blocks import BlockPool
from kvasir_workers.engines.sim.reporting import CacheReport
from kvasir_workers.engines.sim.state import Sequence, SimLimits


class SequenceMemory:
    """Moves sequences in and out of a BlockPool and keeps their `blocks`, `stored` and `computed`. Cached
    blocks are also passed to `report`, if given."""

    def __init__(self, pool: BlockPool, limits: SimLimits, report: CacheReport | None) -> None:
        self._pool = pool
        self._limits = limits
        self._report = report

    def find(self, sequence: Sequence, blocks: int) -> list[int]:
        """Return the cached blocks among the first `blocks` full ones of a sequence, without holding them."""
        if not self._limits.prefix_caching:
            return []
        sequence.hash_up_to(blocks, self._limits.block_size)
        return self._pool.lookup(sequence.hashes[:blocks])

    def hold(self, sequence: Sequence, found: list[int]) -> None:
        """Start a sequence with cached blocks."""
        self._pool.share(found)
        sequence.blocks = found
        sequence.stored = len(found)
        sequence.computed = len(found) * self._limits.block_size

    def extend(self, sequence: Sequence, blocks: int) -> None:
        """Hold `blocks` more empty blocks, which must be free."""
        sequence.blocks += self._pool.take(blocks)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Hold the blocks for `tokens` more; return False if there are too few."""
        reach = sequence.computed + tokens
        short = self._limits.blocks_for(reach) - len(sequence.blocks)
        if short > 0:
            if not self._pool.can_take(short):
                return False
            self.extend(sequence, short)
        self.store(sequence, reach)
        return True

    def store(self, sequence: Sequence, reach: int) -> None:
        """Cache the blocks that are full with `reach` tokens. Steps run in order, so a block is read only
        after it was written."""
        full = reach // self._limits.block_size
        if not self._limits.prefix_caching or full <= sequence.stored:
            return
        size, first = self._limits.block_size, sequence.stored
        sequence.hash_up_to(full, size)
        for at in range(first, full):
            self._pool.store(sequence.blocks[at], sequence.hashes[at])
        sequence.stored = full
        if self._report is not None:
            request, place = sequence.live.request, sequence.place
            tokens = sequence.tokens[first * size : full * size]
            if place is not None:
                mark_place(tokens, first, place, size)
            for item, key in sequence.media:
                mark_item(tokens, item.offset - first * size, item.length, key, size)
            self._report.stored(
                sequence.hashes[first - 1] if first else None,
                sequence.hashes[first:full],
                tokens,
                request.salt if place is None else "",
                request.adapter or "",
            )

    def free(self, sequence: Sequence) -> None:
        """Free all blocks: the sequence has ended, or restarts."""
        self._pool.drop(sequence.blocks)
        sequence.blocks = []
        sequence.stored = 0
        sequence.computed = 0
