"""Which block gives way when a tier is full, from what was asked for before.

A block is worth nothing once a block before it is gone. No policy here knows of chains: whoever touches the
blocks of a prompt does so from its end to its beginning, and then LRU and LFU let go of a prompt's end
before its beginning. What each policy is worth is in docs/adr/0012-eviction-is-lfu-with-ageing.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, Protocol, TypeVar

EvictionKind = Literal["lfu", "lru", "s3fifo"]
K = TypeVar("K", bound=Hashable)
Skip = Callable[[K], bool]


def nothing(_key: object) -> bool:
    """Skip none."""
    return False


class Eviction(Protocol[K]):
    """The order in which keys give way. Every call is O(1), amortised; memory is O(capacity)."""

    def insert(self, key: K) -> None:
        """The key is held from here on. For one that is held already this is a touch."""
        ...

    def touch(self, key: K) -> None:
        """The key was used. Ignored when it is not held."""
        ...

    def remove(self, key: K) -> None:
        """Forget the key and its uses. Ignored when it is not held, as of a victim."""
        ...

    def victim(self, skip: Skip[K] = nothing) -> K | None:
        """Take out the key that gives way first of those that may: it is held no longer. None, where every
        key is to be skipped. A key that was skipped gets a respite, so that the next call need not pass it
        again: while few keys are skipped, passing them costs O(1) too."""
        ...

    def __len__(self) -> int:
        """How many keys are held."""
        ...


def eviction(kind: EvictionKind, capacity: int) -> Eviction[bytes]:
    """The policy of that name for about `capacity` keys, at least one."""
    if kind == "lru":
        return Lru()
    return Lfu(capacity) if kind == "lfu" else S3Fifo(capacity)


class Lru(Generic[K]):
    """What was used least recently gives way."""

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
    """What was used least often gives way, the least recent of these first; old use fades.

    LFU with dynamic ageing (Arlitt et al., 1999): a key's rank is its uses, plus the rank of the newest
    victim when the key was last used. So a key that is used no more is overtaken after as many generations
    of victims as it had uses, of which at most MOST_USES count. The uses of the newest victims are kept, two
    for each key of the capacity: who comes back has them again, and RETURN more, since it should have stayed.
    """

    MOST_USES = 15
    RETURN = 2

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a capacity of {capacity}; at least 1")
        self._age = 0
        self._held: dict[K, tuple[int, int]] = {}
        """Uses and rank. Ranks lie between the age and MOST_USES above it."""
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
    """Three queues (Yang et al., SOSP 2023): what is not used again while it passes the small one gives way.

    A key comes into the small queue, a tenth of the capacity. At its end it moves on to the main one when it
    was used more than once, else it gives way and its name stays in the ghost queue; who comes back from
    there goes to the main queue at once. The main queue passes what was used since it last came round.
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
