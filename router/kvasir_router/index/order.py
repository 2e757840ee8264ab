"""Oldest first: an intrusive list, because entries are moved and taken from the middle all the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT")
NodeT = TypeVar("NodeT")


class Entry(Generic[OwnerT, NodeT]):
    """One owner's hold on one node. Entries of one insertion share `generation`."""

    __slots__ = ("generation", "newer", "node", "older", "owner", "stamp")

    def __init__(self, owner: OwnerT, node: NodeT) -> None:
        self.owner = owner
        self.node = node
        self.stamp = 0.0
        self.generation = 0
        self.older: Entry[OwnerT, NodeT] | None = None
        self.newer: Entry[OwnerT, NodeT] | None = None


class Order(Generic[OwnerT, NodeT]):
    """Every operation takes constant time."""

    def __init__(self) -> None:
        self.oldest: Entry[OwnerT, NodeT] | None = None
        self.newest: Entry[OwnerT, NodeT] | None = None

    def append(self, entry: Entry[OwnerT, NodeT]) -> None:
        """Put an unlinked entry at the newest end."""
        entry.older = self.newest
        if self.newest is None:
            self.oldest = entry
        else:
            self.newest.newer = entry
        self.newest = entry

    def insert_before(self, entry: Entry[OwnerT, NodeT], newer: Entry[OwnerT, NodeT]) -> None:
        """Put an unlinked entry so that it is the next older one of `newer`."""
        entry.newer, entry.older = newer, newer.older
        if newer.older is None:
            self.oldest = entry
        else:
            newer.older.newer = entry
        newer.older = entry

    def remove(self, entry: Entry[OwnerT, NodeT]) -> None:
        """Unlink."""
        if entry.older is None:
            self.oldest = entry.newer
        else:
            entry.older.newer = entry.newer
        if entry.newer is None:
            self.newest = entry.older
        else:
            entry.newer.older = entry.older
        entry.older = entry.newer = None

    def __iter__(self) -> Iterator[Entry[OwnerT, NodeT]]:
        entry = self.oldest
        while entry is not None:
            yield entry
            entry = entry.newer
