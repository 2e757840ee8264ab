"""A tree of the prefixes that each place was sent, as routers keep it that watch only their own decisions.

Block hashes are chained, so a hash stands for its whole prefix and a dictionary of hashes is a tree. Beyond a
budget, the ends of a place's least recently sent prefixes are evicted first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection

from kvasir.ports.routing import RoutingTarget


class SentTree:
    """The prefixes sent; `budget` bounds the blocks remembered per place."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._holders: dict[int, dict[RoutingTarget, None]] = {}
        self._sent: dict[RoutingTarget, OrderedDict[int, None]] = {}

    def insert(self, names: array[int], target: RoutingTarget) -> None:
        """Record that `target` was sent this prefix."""
        sent = self._sent.setdefault(target, OrderedDict())
        for name in reversed(names):
            self._holders.setdefault(name, {}).setdefault(target)
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self._budget:
            self._drop(sent.popitem(last=False)[0], target)

    def match(self, names: array[int]) -> tuple[int, tuple[RoutingTarget, ...]]:
        """Return the number of leading blocks that any place was sent, and the places that were sent the last
        of them, the earliest first."""
        depth = bisect_left(names, True, key=lambda name: name not in self._holders)
        return depth, tuple(self._holders[names[depth - 1]]) if depth else ()

    def match_among(
        self, names: array[int], targets: Collection[RoutingTarget]
    ) -> tuple[int, tuple[RoutingTarget, ...]]:
        """The same for these targets only."""
        wanted = set(targets)
        depth = bisect_left(names, True, key=lambda name: wanted.isdisjoint(self._holders.get(name, ())))
        if not depth:
            return 0, ()
        return depth, tuple(t for t in self._holders[names[depth - 1]] if t in wanted)

    def forget(self, target: RoutingTarget) -> None:
        """All blocks that the target was sent."""
        for name in self._sent.pop(target, ()):
            self._drop(name, target)

    def keep(self, targets: Collection[RoutingTarget]) -> None:
        """Drop places that are gone, once they outnumber these."""
        if len(self._sent) > 2 * len(targets):
            for gone in self._sent.keys() - set(targets):
                self.forget(gone)

    def held(self, target: RoutingTarget) -> int:
        """Number of blocks remembered of a place."""
        return len(self._sent.get(target, ()))

    def _drop(self, name: int, target: RoutingTarget) -> None:
        holders = self._holders[name]
        del holders[target]
        if not holders:
            del self._holders[name]
