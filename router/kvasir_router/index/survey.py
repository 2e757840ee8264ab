"""The largest prefixes that cached prompts share, read from the index for people who look at it.

The index is walked in slices and up to a bound, so that decisions run in between and a large index costs no
more than a small one. Names of blocks stay here: what is returned holds sizes and workers only.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from kvasir.ports.router import SharedPrefix

MOST_BLOCKS = 32_768
"""Blocks of all workers that one survey reads."""
SLICE_BLOCKS = 1_024
"""Blocks between two turns of others."""
_HEADER = struct.Struct("<BBHI")


class PrefixSurvey:
    """Collects blocks of workers, and sums them up. A block's name stands for all blocks before it, so equal
    names are equal prefixes, whoever holds them."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._holders: dict[int, set[str]] = defaultdict(set)
        self.read_blocks = 0
        self.complete = True

    @property
    def room(self) -> int:
        """How many more blocks are read."""
        return max(0, MOST_BLOCKS - self.read_blocks)

    def add(self, worker_id: str, log: bytes) -> None:
        """Add STORED records (kvasir.core.kv.KvEventKind) of what a worker holds."""
        at = 0
        while at < len(log):
            _, _, _, count = _HEADER.unpack_from(log, at)
            at += _HEADER.size
            chain = array("Q", log[at : at + 8 * (count + 1)])
            at += 8 * (count + 1)
            self.read_blocks += count
            for parent, name in pairwise(chain):
                self._parents[name] = parent
                self._holders[name].add(worker_id)

    def largest(self, most: int, found: list[SharedPrefix]) -> Iterator[None]:
        """Put into `found` the prefixes without which most would have to be computed again: those with which
        several cached prompts begin before they differ. Yields between slices of the work."""
        by_depth: list[list[int]] = []
        yield from self._levels(by_depth)
        ends: dict[int, int] = defaultdict(int)
        branches: dict[int, int] = defaultdict(int)
        shared: list[tuple[int, int, int]] = []
        for depth in range(len(by_depth), 0, -1):
            for i, name in enumerate(by_depth[depth - 1]):
                if i % SLICE_BLOCKS == 0:
                    yield
                prompts = ends.pop(name, 0) or 1
                if branches.pop(name, 0) > 1:
                    shared.append((depth * (prompts - 1), depth, name))
                    if len(shared) > 4 * most:
                        shared = heapq.nlargest(most, shared)
                parent = self._parents[name]
                ends[parent] += prompts
                branches[parent] += 1
        for saved, depth, name in heapq.nlargest(most, shared):
            found.append(SharedPrefix(depth, saved // depth + 1, tuple(sorted(self._holders[name]))))

    def _levels(self, by_depth: list[list[int]]) -> Iterator[None]:
        """Put each name into the list of its depth, which counts from 1. A block whose parent was not read
        counts as the first of its prefix."""
        depths: dict[int, int] = {}
        for i, name in enumerate(self._parents):
            if i % SLICE_BLOCKS == 0:
                yield
            above = []
            at = name
            # Workers that contradict each other could report names that are before themselves.
            while at in self._parents and at not in depths:
                depths[at] = 0
                above.append(at)
                at = self._parents[at]
            depth = depths.get(at, 0)
            for each in reversed(above):
                depth += 1
                depths[each] = depth
                if depth > len(by_depth):
                    by_depth.append([])
                by_depth[depth - 1].append(each)
