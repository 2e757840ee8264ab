"""What a durable tier holds as far as it knows, and what of that has changed since it was last told.

Blocks are found to be gone in calls that tell nothing (a read finds a torn file, a server has evicted), and
come back before anybody asked. Told are only the differences: who adds up all changes has what is held.
"""

from __future__ import annotations

from collections import OrderedDict

from kvasir.ports.tier import Block, Change


class Ledger:
    """Blocks by their keys, the least recently used first, and the changes since the last `take`."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        # What was told of each key that has changed since: the block, or None for not held.
        self._told: dict[bytes, Block | None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: Block) -> None:
        """It is held, and has just been used."""
        old = self._blocks.get(block.key)
        self._blocks[block.key] = block
        self._blocks.move_to_end(block.key)
        if old != block:
            self._told.setdefault(block.key, old)

    def remove(self, key: bytes) -> None:
        """It is not held; unknown keys are ignored."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._told.setdefault(key, block)

    def clear(self) -> None:
        """Nothing is held."""
        for key in list(self._blocks):
            self.remove(key)

    def oldest(self) -> bytes:
        """The key that was used least recently. Raises StopIteration when nothing is held."""
        return next(iter(self._blocks))

    def newest(self) -> bytes | None:
        """The key that was used last; None when nothing is held."""
        return next(reversed(self._blocks), None)

    def keys(self) -> list[bytes]:
        """All keys, the least recently used first."""
        return list(self._blocks)

    def blocks(self) -> list[Block]:
        """All blocks, the least recently used first."""
        return list(self._blocks.values())

    def take(self) -> Change:
        """What differs from what was told before."""
        stored = []
        removed = []
        for key, before in self._told.items():
            after = self._blocks.get(key)
            if before == after:
                continue
            if before is not None:
                removed.append(before)
            if after is not None:
                stored.append(after)
        self._told.clear()
        return Change(tuple(stored), tuple(removed))
