"""A path-compressed radix tree over chained block hashes, with owners.

A block hash names its whole prefix (it is chained from a root that covers model, salt and adapter), so
one tree serves all models and tenants without mixing them. Beside the textbook trie:

- an edge is a contiguous run of hashes, so that matching compares memory and chases few pointers;
- every owner of a node holds the node's whole run: where owners differ, the run is split, and where
  neighbours have become alike it is joined again;
- ownership is closed towards the root: who holds a block holds every block before it. Hence the
  deepest node that names an owner tells its whole depth;
- one list through all (owner, node) pairs, oldest first, is both the order of eviction and of expiry,
  since every insertion lives equally long. Within one insertion the deepest block is the oldest, so
  that what goes first is always the end of a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvasir_router.index.order import Entry, Order
from kvasir_router.invariants import require


class Owner(NamedTuple):
    """Who holds a block: a worker's data-parallel rank, in one of its tiers."""

    worker: str
    rank: int = 0
    tier: str = "gpu"


@dataclass(frozen=True, slots=True)
class IndexStats:
    """`blocks` counts a block once for each owner, `edges_blocks` once in all."""

    blocks: int
    edge_blocks: int
    nodes: int
    owners: int
    expired_blocks: int
    evicted_blocks: int


class _Node:
    """`depth` is the number of blocks before the run."""

    __slots__ = ("children", "depth", "entries", "parent", "run")

    def __init__(self, run: list[int], parent: _Node | None, depth: int) -> None:
        self.run = run
        self.parent = parent
        self.depth = depth
        self.children: dict[int, _Node] = {}
        self.entries: dict[Owner, Entry[Owner, _Node]] = {}


def _common(run: list[int], hashes: Sequence[int], start: int) -> int:
    """How many leading hashes of `run` continue `hashes` at `start`."""
    length = min(len(run), len(hashes) - start)
    if run[:length] == list(hashes[start : start + length]):
        return length
    return next(i for i in range(length) if run[i] != hashes[start + i])


class PrefixIndex:
    """Predicted ownership of prefixes: bounded, expiring, and exact about both.

    `capacity_blocks` bounds the sum over owners of the blocks that each holds; beyond it the least
    recently inserted ends of prefixes go first. What was inserted is believed for `ttl_s` seconds.
    Time is whatever the caller passes as `now`, and must not go backwards.
    """

    def __init__(self, *, capacity_blocks: int, ttl_s: float) -> None:
        self._capacity = capacity_blocks
        self._ttl_s = ttl_s
        self._root = _Node([], None, 0)
        self._order: Order[Owner, _Node] = Order()
        self._by_worker: dict[str, dict[Entry[Owner, _Node], None]] = {}
        self._held: dict[Owner, int] = {}
        self._blocks = 0
        self._generation = 0
        self._expired = 0
        self._evicted = 0

    def insert(self, owner: Owner, hashes: Sequence[int], now: float) -> None:
        """`owner` holds the prefix `hashes` from `now` on. What exceeds the capacity is cut off at
        its end."""
        self.expire(now)
        hashes = hashes[: self._capacity]
        self._generation += 1
        path = self._path(hashes)
        for node in reversed(path):
            self._touch(node, owner, now)
        for node in reversed(path):
            self._join(node)
        self._evict()

    def match(self, hashes: Sequence[int]) -> dict[Owner, int]:
        """For each owner of at least the first block, how many leading blocks it holds."""
        depths: dict[Owner, int] = {}
        node, depth = self._root, 0
        while depth < len(hashes):
            child = node.children.get(hashes[depth])
            if child is None:
                break
            common = _common(child.run, hashes, depth)
            depth += common
            for owner in child.entries:
                depths[owner] = depth
            if common < len(child.run):
                break
            node = child
        return depths

    def expire(self, now: float) -> None:
        """Forget what was inserted `ttl_s` or longer before `now`."""
        limit = now - self._ttl_s
        while (entry := self._order.oldest) is not None and entry.stamp <= limit:
            self._expired += len(entry.node.run)
            self._drop(entry)

    def remove_worker(self, worker: str) -> None:
        """Forget all that `worker` holds, in every rank and tier."""
        entries = self._by_worker.get(worker, {})
        for entry in sorted(entries, key=lambda entry: -entry.node.depth):
            # A drop may have joined this entry's node to the one above it, whose turn comes later.
            if entry in entries:
                self._drop(entry)

    def held(self, owner: Owner) -> int:
        """How many blocks `owner` is believed to hold."""
        return self._held.get(owner, 0)

    def stats(self) -> IndexStats:
        """Sizes and what has been dropped since the start. Walks the tree: not for the request path."""
        nodes = list(self._walk())
        return IndexStats(
            blocks=self._blocks,
            edge_blocks=sum(len(node.run) for node in nodes),
            nodes=len(nodes),
            owners=len(self._held),
            expired_blocks=self._expired,
            evicted_blocks=self._evicted,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError, naming what is wrong, unless every invariant of the tree holds."""
        blocks = 0
        held: dict[Owner, int] = {}
        linked = list(self._order)
        for node in self._walk():
            parent = node.parent
            if parent is None:
                raise AssertionError("a node without a parent")
            require(node.run and node.entries, "an empty node")
            require(parent.children[node.run[0]] is node, "a child under a wrong key")
            require(node.depth == parent.depth + len(parent.run), "a wrong depth")
            if parent.parent is not None:
                require(node.entries.keys() <= parent.entries.keys(), "a hold without its prefix")
                alone = len(parent.children) == 1
                require(not (alone and _holds(node) == _holds(parent)), "a run that should be one")
            for owner, entry in node.entries.items():
                require(entry.node is node and entry.owner == owner, "a misplaced hold")
                require(entry in self._by_worker[owner.worker], "a hold unknown to its worker")
                above = parent.entries.get(owner)
                require(above is None or entry.generation <= above.generation, "a prefix that ends first")
                held[owner] = held.get(owner, 0) + len(node.run)
                blocks += len(node.run)
        require(blocks == self._blocks <= self._capacity, "blocks are miscounted")
        require(held == self._held, "an owner's blocks are miscounted")
        require(len(linked) == sum(map(len, self._by_worker.values())), "holds are miscounted")
        stamps = [(entry.generation, -entry.node.depth) for entry in linked]
        require(stamps == sorted(stamps), "the order of ages is broken")

    def _walk(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _path(self, hashes: Sequence[int]) -> list[_Node]:
        """The nodes whose runs are together exactly `hashes`, made or split where needed."""
        path: list[_Node] = []
        node, depth = self._root, 0
        while depth < len(hashes):
            child = node.children.get(hashes[depth])
            if child is None:
                child = _Node(list(hashes[depth:]), node, depth)
                node.children[hashes[depth]] = child
            else:
                common = _common(child.run, hashes, depth)
                if common < len(child.run):
                    self._split(child, common)
            path.append(child)
            depth += len(child.run)
            node = child
        return path

    def _touch(self, node: _Node, owner: Owner, now: float) -> None:
        entry = node.entries.get(owner)
        if entry is None:
            entry = self._adopt(owner, node)
            self._blocks += len(node.run)
            self._held[owner] = self._held.get(owner, 0) + len(node.run)
        else:
            self._order.remove(entry)
        entry.stamp, entry.generation = now, self._generation
        self._order.append(entry)

    def _adopt(self, owner: Owner, node: _Node) -> Entry[Owner, _Node]:
        entry = Entry(owner, node)
        node.entries[owner] = entry
        self._by_worker.setdefault(owner.worker, {})[entry] = None
        return entry

    def _disown(self, entry: Entry[Owner, _Node]) -> None:
        self._order.remove(entry)
        del entry.node.entries[entry.owner]
        entries = self._by_worker[entry.owner.worker]
        del entries[entry]
        if not entries:
            del self._by_worker[entry.owner.worker]

    def _split(self, node: _Node, at: int) -> None:
        """Leave `node` its first `at` blocks; a new only child takes the rest and all its holds."""
        tail = _Node(node.run[at:], node, node.depth + at)
        del node.run[at:]
        tail.children = node.children
        for child in tail.children.values():
            child.parent = tail
        node.children = {tail.run[0]: tail}
        for owner, entry in node.entries.items():
            copy = self._adopt(owner, tail)
            copy.stamp, copy.generation = entry.stamp, entry.generation
            self._order.insert_before(copy, entry)

    def _join(self, node: _Node) -> None:
        """Take over an only child that the same insertions hold."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if _holds(child) != _holds(node):
            return
        for entry in list(child.entries.values()):
            self._disown(entry)
        node.run.extend(child.run)
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node

    def _drop(self, entry: Entry[Owner, _Node]) -> None:
        """End one owner's hold on one node, deeper ones having ended before."""
        node, owner = entry.node, entry.owner
        self._disown(entry)
        self._blocks -= len(node.run)
        self._held[owner] -= len(node.run)
        if not self._held[owner]:
            del self._held[owner]
        if node.entries:
            self._join(node)
        elif node.parent is not None:
            del node.parent.children[node.run[0]]
            self._join(node.parent)

    def _evict(self) -> None:
        while (excess := self._blocks - self._capacity) > 0:
            entry = self._order.oldest
            if entry is not None and len(entry.node.run) > excess:
                self._split(entry.node, len(entry.node.run) - excess)
                entry = self._order.oldest
            if entry is None:
                raise AssertionError("blocks are accounted that nobody holds")
            self._evicted += len(entry.node.run)
            self._drop(entry)


def _holds(node: _Node) -> dict[Owner, int]:
    return {owner: entry.generation for owner, entry in node.entries.items()}
