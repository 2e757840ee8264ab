"""Eviction policies: which block is evicted when a tier is full, based on past uses.

A block is useless without the blocks before it. The policies here do not know about chains: callers touch the
blocks of a prompt from its end to its beginning, so that LRU and LFU evict a prompt's end before its
beginning. docs/adr/0012-eviction-is-lfu-with-ageing.md compares the policies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, Protocol, TypeVar

EvictionKind = Literal["lfu", "lru", "s3fifo"]
K = TypeVar("K", bound=Hashable)
Skip = Callable[[K], bool]


def nothing(_key: object) -> bool:
    """Skip no key."""
    return False


class Eviction(Protocol[K]):
    """The order in which keys are evicted. Every call is O(1), amortized; memory is O(capacity)."""

    def insert(self, key: K) -> None:
        """Add a key. For a key that is held this is a touch."""
        ...

    def touch(self, key: K) -> None:
        """Record a use of the key. Ignored if it is not held."""
        ...

    def remove(self, key: K) -> None:
        """Remove the key and its uses. Ignored if it is not held, as after `victim`."""
        ...

    def victim(self, skip: Skip[K] = nothing) -> K | None:
        """Remove and return the first key in eviction order that `skip` does not exclude; None if it excludes
        all. A skipped key moves back in the order, so that the next call need not skip it again: with few
        skipped keys, this is amortized O(1) too."""
        ...

    def __len__(self) -> int:
        """Number of held keys."""
        ...


def eviction(kind: EvictionKind, capacity: int) -> Eviction[bytes]:
    """Return the policy of that name for about `capacity` keys, at least one."""
    if kind == "lru":
        return Lru()
    return Lfu(capacity) if kind == "lfu" else S3Fifo(capacity)


class Lru(Generic[K]):
    """Evicts the least recently used key."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """See Eviction."""
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: K) -> None:
        """See Eviction."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        """See Eviction."""
        self._order.pop(key, None)

    def victim(self, skip: Skip[K] = nothing) -> K | None:
        """See Eviction."""
        passed = []
        found = None
        while self._order and found is None:
            key, _ = self._order.popitem(last=False)
            if skip(key):
                passed.append(key)
            else:
                found = key
        for key in passed:
            self._order[key] = None
        return found

    def __len__(self) -> int:
        return len(self._order)


class Lfu(Generic[K]):
    """Evicts the least frequently used key, the least recently used first among equals; old uses age.

    LFU with dynamic ageing (Arlitt et al., 1999): a key's rank is its uses, plus the rank of the latest
    victim when the key was last used. So an unused key is overtaken after as many generations of victims as
    it had uses, of which at most MOST_USES count. The uses of the latest victims are kept, two per key of the
    capacity: a key that returns gets them back, and RETURN more, since its eviction was a mistake.
    """

    MOST_USES = 15
    RETURN = 2

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a capacity of {capacity}; at least 1")
        self._age = 0
        self._held: dict[K, tuple[int, int]] = {}
        """Uses and rank. Ranks are between the age and MOST_USES above it."""
        self._buckets: dict[int, OrderedDict[K, None]] = {}
        self._ghosts: OrderedDict[K, int] = OrderedDict()
        self._ghosts_at_most = 2 * capacity

    def insert(self, key: K) -> None:
        """See Eviction."""
        if key in self._held:
            self.touch(key)
            return
        before = self._ghosts.pop(key, None)
        self._place(key, 1 if before is None else min(before + 1 + self.RETURN, self.MOST_USES))

    def touch(self, key: K) -> None:
        """See Eviction."""
        if key in self._held:
            self._place(key, min(self._take(key) + 1, self.MOST_USES))

    def remove(self, key: K) -> None:
        """See Eviction."""
        if key in self._held:
            self._take(key)

    def victim(self, skip: Skip[K] = nothing) -> K | None:
        """See Eviction."""
        passed: list[K] = []
        found = self._lowest(skip, passed)
        if found is not None:
            self._age = self._held[found][1]
            self._ghosts[found] = self._take(found)
            if len(self._ghosts) > self._ghosts_at_most:
                self._ghosts.popitem(last=False)
        for key in passed:
            self._place(key, self._take(key))
        return found

    def __len__(self) -> int:
        return len(self._held)

    def _lowest(self, skip: Skip[K], passed: list[K]) -> K | None:
        for rank in range(self._age, self._age + self.MOST_USES + 1):
            for key in self._buckets.get(rank, ()):
                if not skip(key):
                    return key
                passed.append(key)
        return None

    def _place(self, key: K, uses: int) -> None:
        rank = self._age + uses
        self._held[key] = uses, rank
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = OrderedDict()
        bucket[key] = None

    def _take(self, key: K) -> int:
        uses, rank = self._held.pop(key)
        bucket = self._buckets[rank]
        del bucket[key]
        if not bucket:
            del self._buckets[rank]
        return uses


class S3Fifo(Generic[K]):
    """Three queues (Yang et al., SOSP 2023): a key that is not used again while in the small queue is
    evicted.

    A key enters the small queue, a tenth of the capacity. At its end it moves to the main queue if it was
    used more than once, else it is evicted and remembered in the ghost queue; a key that returns from there
    enters the main queue at once. The main queue skips keys that were used since the last round.
    """

    def __init__(self, capacity: int, *, small: float = 0.1) -> None:
        if capacity < 1:
            raise ValueError(f"a capacity of {capacity}; at least 1")
        self._share = max(1, int(capacity * small))
        self._ghosts_at_most = capacity - self._share
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """See Eviction."""
        if key in self._small or key in self._main:
            self.touch(key)
        elif key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: K) -> None:
        """See Eviction."""
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(queue[key] + 1, 3)

    def remove(self, key: K) -> None:
        """See Eviction."""
        self._small.pop(key, None)
        self._main.pop(key, None)

    def victim(self, skip: Skip[K] = nothing) -> K | None:
        """See Eviction."""
        passed: list[tuple[OrderedDict[K, int], K, int]] = []
        found = None
        while found is None and (self._small or self._main):
            small = len(self._small) >= self._share or not self._main
            queue = self._small if small else self._main
            key, uses = queue.popitem(last=False)
            if uses > (1 if small else 0):
                self._main[key] = 0 if small else uses - 1
            elif skip(key):
                passed.append((queue, key, uses))
            else:
                found = key
                if small:
                    self._remember(key)
        for queue, key, uses in passed:
            queue[key] = uses
        return found

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _remember(self, key: K) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > self._ghosts_at_most:
            self._ghosts.popitem(last=False)
