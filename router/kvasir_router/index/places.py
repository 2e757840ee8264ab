"""The tree's groups as places in the fleet: rows to look a prefix up in, opened and given up at will."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.core.kv import MEDIA, Medium
from kvasir.native import PREDICTED, PrefixTree

_FIRST_ROWS = 16


class RankGroups(NamedTuple):
    """Groups of one worker by rank: what it holds itself, and what it has reported of a store that it shares
    with others; none of the latter where it shares none, or is not asked."""

    own: tuple[int, ...]
    remote: tuple[int, ...] = ()


class Places:
    """Groups of one tree. `nowhere` is a group that never holds anything."""

    def __init__(self, *, capacity_blocks: int, predicted_blocks: int) -> None:
        self.tree = PrefixTree(capacity_blocks, predicted_blocks)
        self.nowhere = self.tree.add_group()
        self.unswept = False
        self._beyond = array("I")
        self._make_room(_FIRST_ROWS)

    def open(self, count: int) -> tuple[int, ...]:
        """New groups. Raises OverflowError, with none opened, when the tree has no more."""
        groups: list[int] = []
        try:
            for _ in range(count):
                groups.append(self.tree.add_group())
        except OverflowError:
            self.close(groups)
            raise
        if (rows := max(groups) + 1) > len(self._depths):
            self._make_room(max(rows, 2 * len(self._depths)))
        return tuple(groups)

    def close(self, groups: Sequence[int]) -> None:
        """They vanish at once; what they held is reclaimed by `sweep`."""
        for group in groups:
            if group != self.nowhere:
                self.tree.drop_group(group)
                self.unswept = True

    def sweep(self, blocks: int) -> None:
        """Reclaim about so many blocks of groups that were closed."""
        self.unswept = self.tree.sweep(blocks) > 0

    def match(self, names: array[int]) -> NDArray[np.uint32]:
        """For each group and medium, how many leading blocks are held there or faster; valid until the
        next call."""
        self.tree.match(names, self._buffer)
        return self._depths

    def match_from(self, names: array[int], first: int) -> NDArray[np.uint32]:
        """The same for the names from `first` on, beside what `match` has answered."""
        if len(self._beyond) != len(self._buffer):
            self._beyond = array("I", bytes(4 * len(self._buffer)))
        self.tree.match(memoryview(names)[first:], self._beyond)
        return np.frombuffer(self._beyond, np.uint32).reshape(-1, MEDIA)

    def reported(self, groups: Sequence[int]) -> int:
        """Blocks that are reported, over all media."""
        return sum(self.tree.held(group, medium) for group in groups for medium in Medium)

    def predicted(self, groups: Sequence[int]) -> int:
        """Blocks that are foreseen."""
        return sum(self.tree.held(group, PREDICTED) for group in groups)

    def _make_room(self, rows: int) -> None:
        self._buffer = array("I", bytes(4 * MEDIA * rows))
        self._depths: NDArray[np.uint32] = np.frombuffer(self._buffer, np.uint32).reshape(rows, MEDIA)
