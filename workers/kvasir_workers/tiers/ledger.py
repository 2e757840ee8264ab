"""The blocks that a durable tier is known to hold, and their changes since the last report.

Blocks are found missing in calls that report nothing (a read finds a torn file, a server has evicted), and
may return before the next report. Only differences are reported: the sum of all changes is what is held.
"""

from __future__ import annotations

from collections import OrderedDict

from kvasir.ports.tier import TierBlock, TierChange


class BlockLedger:
    """At most `most` blocks by key, ordered by last use, and the changes since the last `take`. Beyond
    `most`, the least recently used block is forgotten, and reported as removed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[bytes, TierBlock] = OrderedDict()
        # For each key whose state differs from the last report, the reported state: the block, or None for
        # not held.
        self._changed: dict[bytes, TierBlock | None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: TierBlock) -> None:
        """Record that the block is held and was just used."""
        before = self._blocks.pop(block.key, None)
        self._blocks[block.key] = block
        self._note(block.key, before, block)
        if len(self._blocks) > self._most:
            self.remove(next(iter(self._blocks)))

    def remove(self, key: bytes) -> None:
        """Record that the block is not held; unknown keys are ignored."""
        self._note(key, self._blocks.pop(key, None), None)

    def clear(self) -> None:
        """Record that nothing is held."""
        for key in self.keys():
            self.remove(key)

    def newest(self) -> bytes | None:
        """Return the most recently used key; None if nothing is held."""
        return next(reversed(self._blocks), None)

    def keys(self) -> list[bytes]:
        """Return all keys, the least recently used first."""
        return list(self._blocks)

    def blocks(self) -> list[TierBlock]:
        """Return all blocks, the least recently used first."""
        return list(self._blocks.values())

    def take(self) -> TierChange:
        """Return the difference to the last report."""
        stored = tuple(self._blocks[key] for key in self._changed if key in self._blocks)
        removed = tuple(block for block in self._changed.values() if block is not None)
        self._changed.clear()
        return TierChange(stored, removed)

    def _note(self, key: bytes, before: TierBlock | None, after: TierBlock | None) -> None:
        if before != after and self._changed.setdefault(key, before) == after:
            del self._changed[key]
