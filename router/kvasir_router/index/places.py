"""The tree's groups as places of the fleet: rows for lookups, opened and closed on demand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.core.kv import MEDIA
from kvasir.native import PREDICTED, PrefixTree

_FIRST_ROWS = 16


class RankGroups(NamedTuple):
    """Groups of one worker by rank: what it holds itself, and what it reported of a store that it shares. The
    latter is empty if it shares none, or is not tracked."""

    own: tuple[int, ...]
    remote: tuple[int, ...] = ()


class Places:
    """Groups of one tree. `nowhere` is a group that is always empty."""

    def __init__(self, *, capacity_blocks: int, predicted_blocks: int) -> None:
        self.tree = PrefixTree(capacity_blocks, predicted_blocks)
        self.nowhere = self.tree.add_group()
        self.unswept = False
        self._beyond = array("I")
        self._make_room(_FIRST_ROWS)

    def open(self, count: int) -> tuple[int, ...]:
        """Open groups. Raises OverflowError, with none opened, if the tree has no more."""
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
        """Close groups: their contents disappear at once, and `sweep` reclaims the memory."""
        for group in groups:
            if group != self.nowhere:
                self.tree.drop_group(group)
                self.unswept = True

    def sweep(self, blocks: int) -> None:
        """Reclaim about `blocks` blocks of closed groups."""
        self.unswept = self.tree.sweep(blocks) > 0

    def match(self, names: array[int]) -> NDArray[np.uint32]:
        """Return, for each group and medium, the number of leading blocks held there or in a faster medium;
        valid until the next call."""
        self.tree.match(names, self._buffer)
        return self._depths

    def match_from(self, names: array[int], first: int) -> NDArray[np.uint32]:
        """As `match`, for the hashes from `first` on, beside the result of `match`."""
        if len(self._beyond) != len(self._buffer):
            self._beyond = array("I", bytes(4 * len(self._buffer)))
        self.tree.match(memoryview(names)[first:], self._beyond)
        return np.frombuffer(self._beyond, np.uint32).reshape(-1, MEDIA)

    def reported(self, groups: Sequence[int]) -> int:
        """Number of reported blocks, over all media."""
        return sum(self.tree.held(group, medium) for group in groups for medium in range(MEDIA))

    def predicted(self, groups: Sequence[int]) -> int:
        """Number of predicted blocks."""
        return sum(self.tree.held(group, PREDICTED) for group in groups)

    def _make_room(self, rows: int) -> None:
        self._buffer = array("I", bytes(4 * MEDIA * rows))
        self._depths: NDArray[np.uint32] = np.frombuffer(self._buffer, np.uint32).reshape(rows, MEDIA)
