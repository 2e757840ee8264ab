"""What a durable tier holds as far as it knows, and what of that has changed since it was last told.

Blocks are found to be gone in calls that tell nothing (a read finds a torn file, a server has evicted), and
come back before anybody asked. Told are only the differences: who adds up all changes has what is held.
"""

from __future__ import annotations

from collections import OrderedDict

from kvasir.ports.tier import TierBlock, TierChange


class BlockLedger:
    """At most `most` blocks by their keys, the least recently used first, and the changes since the last
    `take`. Of more, the least recently used is forgotten, and told to be gone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[bytes, TierBlock] = OrderedDict()
        # What was told of each key that is no longer so: the block, or None for not held.
        self._changed: dict[bytes, TierBlock | None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: TierBlock) -> None:
        """It is held, and has just been used."""
        before = self._blocks.pop(block.key, None)
        self._blocks[block.key] = block
        self._note(block.key, before, block)
        if len(self._blocks) > self._most:
            self.remove(next(iter(self._blocks)))

    def remove(self, key: bytes) -> None:
        """It is not held; unknown keys are ignored."""
        self._note(key, self._blocks.pop(key, None), None)

    def clear(self) -> None:
        """Nothing is held."""
        for key in self.keys():
            self.remove(key)

    def newest(self) -> bytes | None:
        """The key that was used last; None when nothing is held."""
        return next(reversed(self._blocks), None)

    def keys(self) -> list[bytes]:
        """All keys, the least recently used first."""
        return list(self._blocks)

    def blocks(self) -> list[TierBlock]:
        """All blocks, the least recently used first."""
        return list(self._blocks.values())

    def take(self) -> TierChange:
        """What differs from what was told before."""
        stored = tuple(self._blocks[key] for key in self._changed if key in self._blocks)
        removed = tuple(block for block in self._changed.values() if block is not None)
        self._changed.clear()
        return TierChange(stored, removed)

    def _note(self, key: bytes, before: TierBlock | None, after: TierBlock | None) -> None:
        if before != after and self._changed.setdefault(key, before) == after:
            del self._changed[key]
