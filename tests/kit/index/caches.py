"""Caches of workers over a tiny alphabet of blocks, and the records that workers keep of them: the truth
with which a router's index is compared.

Names are few, so that prefixes meet all the time.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from random import Random

from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.kv import KvBatch, KvEventKind, Medium
from kvasir.core.requests import Role
from kvasir_router.index import IndexMode

DEPTH = 4
PATHS = [path for depth in range(1, DEPTH + 1) for path in itertools.product((0, 1), repeat=depth)]
NAME = {path: 0x9E3779B97F4A7C15 * (number + 1) % (1 << 64) for number, path in enumerate(PATHS)}
LEAVES = list(itertools.product((0, 1), repeat=DEPTH))
CHAIN = {leaf: array("Q", [NAME[leaf[:depth]] for depth in range(1, DEPTH + 1)]) for leaf in LEAVES}
USED_MEDIA = (Medium.DEVICE, Medium.CPU)

Path = tuple[int, ...]
Held = dict[tuple[int, Medium], set[Path]]


def record(kind: KvEventKind, medium: Medium, rank: int, paths: list[Path]) -> bytes:
    names = array("Q", [NAME[path] for path in paths]).tobytes()
    head = struct.pack("<BBHI", kind, medium, rank, len(paths))
    if kind is KvEventKind.STORED:
        head += struct.pack("<Q", NAME.get(paths[0][:-1], 0))
    return head + names


def depths(held: Held, rank: int, leaf: Path) -> list[int]:
    """What a lookup must find of one rank: by medium, how many leading blocks are there or faster."""
    found = []
    for medium in Medium:
        owned = [held[rank, each] for each in USED_MEDIA if each <= medium]
        depth = 0
        while depth < DEPTH and any(leaf[: depth + 1] in own for own in owned):
            depth += 1
        found.append(depth)
    return found


class Worker:
    """The truth about one worker, and the record that it keeps of it."""

    def __init__(self, worker_id: str, mode: IndexMode, ranks: int, reports: bool) -> None:
        self.worker_id = worker_id
        self.mode = mode
        self.ranks = ranks
        self.reports = reports
        self.places = [(rank, medium) for rank in range(ranks) for medium in USED_MEDIA]
        self.life = 0
        self.begin()

    def begin(self) -> None:
        """A new process."""
        self.life += 1
        self.epoch = 100 * self.life
        self.sequence = 0
        self.held: Held = {place: set() for place in self.places}
        self.log = bytearray()
        self.complete = True
        self.truth = {(self.epoch, 0): self.copy()}

    @property
    def identity(self) -> WorkerIdentity:
        return WorkerIdentity(
            worker_id=self.worker_id,
            epoch=self.life,
            pool="p",
            role=Role.BOTH,
            model="m",
            revision="",
            tokenizer_digest="t",
            max_model_len=100,
            kv=KvLayout(4, "f32", "nhd", 1, 1, 1, 64),
            kv_blocks=20,
            engine="fake",
            engine_version="0",
            data_parallel_size=self.ranks,
            reports_kv=self.reports,
        )

    def copy(self) -> Held:
        return {place: set(paths) for place, paths in self.held.items()}

    def store(self, rng: Random) -> None:
        rank, medium = rng.choice(self.places)
        leaf = rng.choice(LEAVES)
        first = 0
        while first < DEPTH - 1 and any(leaf[: first + 1] in self.held[rank, m] for m in USED_MEDIA):
            first += 1
        first = rng.randrange(first + 1)
        paths = [leaf[: depth + 1] for depth in range(first, rng.randrange(first, DEPTH) + 1)]
        self.held[rank, medium].update(paths)
        self.log += record(KvEventKind.STORED, medium, rank, paths)

    def evict(self, rng: Random) -> None:
        rank, medium = rng.choice(self.places)
        held = self.held[rank, medium]
        gone = [path for path in sorted(held) if rng.random() < 0.4]
        if gone:
            held.difference_update(gone)
            self.log += record(KvEventKind.REMOVED, medium, rank, gone)

    def clear(self, rng: Random) -> None:
        rank, medium = rng.choice(self.places)
        self.held[rank, medium].clear()
        self.log += record(KvEventKind.CLEARED, medium, rank, [])

    def flush(self) -> KvBatch | None:
        log, self.log = bytes(self.log), bytearray()
        if not self.complete or not self.reports:
            return None
        self.sequence += 1
        self.truth[self.epoch, self.sequence] = self.copy()
        return KvBatch(self.epoch, self.sequence, log)

    def lose(self) -> KvBatch | None:
        """The engine's ring has overflowed: the record is of no use for a while."""
        self.epoch, self.sequence, self.complete = self.epoch + 1, 1, False
        self.truth[self.epoch, 1] = {}
        return KvBatch(self.epoch, 1, b"") if self.reports else None

    def restore(self, rng: Random) -> None:
        if not self.complete:
            self.complete = True
            self.log.clear()
            if rng.random() < 0.7:
                for held in self.held.values():
                    held.clear()
            self.truth[self.epoch, self.sequence] = self.copy()
