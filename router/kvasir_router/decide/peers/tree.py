"""Who was sent which prefix: the routers that watch only their own decisions keep a tree like this.

Block names are chained, so that a name stands for its whole prefix and a dictionary of names is a tree.
What a place was sent is forgotten beyond a budget, the ends of the least recently sent prefixes first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection

from kvasir.ports.routing import RoutingTarget


class SentTree:
    """`budget` bounds the blocks that are remembered of one place."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._holders: dict[int, dict[RoutingTarget, None]] = {}
        self._sent: dict[RoutingTarget, OrderedDict[int, None]] = {}

    def insert(self, names: array[int], target: RoutingTarget) -> None:
        """`target` was sent this prefix."""
        sent = self._sent.setdefault(target, OrderedDict())
        for name in reversed(names):
            self._holders.setdefault(name, {}).setdefault(target)
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self._budget:
            self._drop(sent.popitem(last=False)[0], target)

    def match(self, names: array[int]) -> tuple[int, tuple[RoutingTarget, ...]]:
        """How many leading blocks anybody was sent, and who was sent the last of them, first sent first."""
        depth = bisect_left(names, True, key=lambda name: name not in self._holders)
        return depth, tuple(self._holders[names[depth - 1]]) if depth else ()

    def match_among(
        self, names: array[int], targets: Collection[RoutingTarget]
    ) -> tuple[int, tuple[RoutingTarget, ...]]:
        """The same of these targets only."""
        wanted = set(targets)
        depth = bisect_left(names, True, key=lambda name: wanted.isdisjoint(self._holders.get(name, ())))
        if not depth:
            return 0, ()
        return depth, tuple(t for t in self._holders[names[depth - 1]] if t in wanted)

    def forget(self, target: RoutingTarget) -> None:
        """All that it was sent."""
        for name in self._sent.pop(target, ()):
            self._drop(name, target)

    def keep(self, targets: Collection[RoutingTarget]) -> None:
        """Forget places that are long gone: once there are more of them than of these."""
        if len(self._sent) > 2 * len(targets):
            for gone in self._sent.keys() - set(targets):
                self.forget(gone)

    def held(self, target: RoutingTarget) -> int:
        """Blocks that are remembered of a place."""
        return len(self._sent.get(target, ()))

    def _drop(self, name: int, target: RoutingTarget) -> None:
        holders = self._holders[name]
        del holders[target]
        if not holders:
            del self._holders[name]
