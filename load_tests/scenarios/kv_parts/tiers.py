"""Our tiers: blocks from an engine's KV to host memory, disk or Redis, and back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvasir.config.spec.tiers import DiskTierSpec, RedisTierSpec
from kvasir.ports.tier import KEY_BYTES, KvTier, TierBlock, TierRead, TierWrite
from kvasir_workers.tiers.blob import fingerprint
from kvasir_workers.tiers.blobs.disk import DiskTier
from kvasir_workers.tiers.blobs.redis_tier import RedisTier
from kvasir_workers.tiers.copier import HostCopier, SlotPart
from kvasir_workers.tiers.memory import SharedMemory
from load_tests.page_cache import evict, write_through
from load_tests.scenarios.kv_parts.memory import Case, Memory

PATIENCE_S = 30.0


class TierError(RuntimeError):
    """A tier did not store or return the blocks to be measured."""


class HostBench:
    """Slots of host memory: a full block is copied to a slot, and back when it is needed again."""

    def __init__(self) -> None:
        self._case: Case | None = None

    def prepare(self, case: Case, seed: int) -> None:
        """Allocate a case's KV, the target of loads, and one slot per block."""
        if self._case == case:
            return
        self._case = case
        self._source, self._target = Memory(case, seed), Memory(case, None)
        memory = SharedMemory.create(case.blocks, case.block_bytes)
        np.frombuffer(memory.view, np.uint8)[:] = 0
        part = SlotPart(memory, 0)
        self._out = HostCopier(self._source.regions, part, time.perf_counter)
        self._back = HostCopier(self._target.regions, part, time.perf_counter)
        self._slots = list(range(case.blocks))

    def store(self) -> float:
        """Copy to the slots; return the seconds."""
        case = self._prepared()
        began = time.perf_counter()
        self._out.store(case.ids(1), self._slots)
        return time.perf_counter() - began

    def load(self) -> float:
        """Copy from the slots; return the seconds."""
        case = self._prepared()
        began = time.perf_counter()
        self._back.load(self._slots, case.ids(2))
        return time.perf_counter() - began

    def check(self) -> None:
        """Raise TierError if the loaded bytes differ."""
        case = self._prepared()
        if self._source.digest(case.ids(1)) != self._target.digest(case.ids(2)):
            raise TierError("other bytes came back")

    def _prepared(self) -> Case:
        if self._case is None:
            raise TierError("nothing is prepared")
        return self._case


class LowerBench:
    """A tier below host memory. `kind` is disk, with the folder `where`, or redis, with a URL. With `cold`,
    what a disk stores is written through in the measured time, and is not in the page cache when it is
    loaded."""

    def __init__(self, kind: str, where: str, cold: bool = False) -> None:
        self._cold = cold
        self._kind = kind
        self._where = where
        self._tier: KvTier | None = None
        self._case: Case | None = None
        self._round = 0
        self._blocks: list[TierBlock] = []

    def prepare(self, case: Case, seed: int) -> None:
        """Allocate slots with a case's bytes, and slots to load into."""
        if self._case == case:
            return
        self.close()
        self._case = case
        words = np.random.default_rng(seed).integers(0, 1 << 63, case.total // 8, dtype=np.uint64)
        self._source = words
        self._target = np.full_like(words, 0)
        self._tier = self._open(case)
        while self._tier.maintain() != ((), ()):
            pass

    def store(self) -> float:
        """Store all blocks under new names, after deleting those of the last round; return the seconds."""
        case, tier = self._prepared()
        tier.drop([block.key for block in self._blocks])
        self._round += 1
        names = [self._round << 32 | number for number in range(1, case.blocks + 1)]
        self._blocks = [TierBlock(name.to_bytes(KEY_BYTES, "big"), name, name - 1) for name in names]
        views = _slots(self._source, case)
        began = time.perf_counter()
        kept = tier.put([TierWrite(block, view) for block, view in zip(self._blocks, views, strict=True)])
        if self._cold:
            write_through(self._files())
        seconds = time.perf_counter() - began
        if len(kept.stored) != case.blocks:
            raise TierError(f"{len(kept.stored)} of {case.blocks} blocks were kept: {tier.load()}")
        return seconds

    def load(self) -> float:
        """Look up all blocks and read them; return the seconds."""
        case, tier = self._prepared()
        reads = [
            TierRead(block.key, view)
            for block, view in zip(self._blocks, _slots(self._target, case), strict=True)
        ]
        if self._cold:
            evict(self._files())
        began = time.perf_counter()
        found = tier.lookup([read.key for read in reads])
        count = tier.get(reads[:found])
        seconds = time.perf_counter() - began
        if count != case.blocks:
            raise TierError(f"{count} of {case.blocks} blocks came back: {tier.load()}")
        return seconds

    def check(self) -> None:
        """Raise TierError if the loaded bytes differ."""
        if not np.array_equal(self._source, self._target):
            raise TierError("other bytes came back")

    def close(self) -> None:
        """Delete everything that was stored."""
        if self._tier is not None:
            self._tier.drop([block.key for block in self._blocks])
            self._tier.close()
            self._tier, self._blocks, self._case = None, [], None

    def _files(self) -> Iterator[Path]:
        return (path for path in Path(self._where).rglob("*") if path.is_file())

    def _open(self, case: Case) -> KvTier:
        shape = Memory(Case(case.block_bytes, case.piece, case.layers), None).layout
        mark = fingerprint("bench", "", shape)
        if self._kind == "disk":
            folder = Path(self._where) / f"{case.block_bytes}-{case.blocks}"
            disk = DiskTierSpec(path=str(folder), bytes=3 * case.total, timeout_s=PATIENCE_S)
            return DiskTier(disk, mark, case.block_bytes)
        redis = RedisTierSpec(url=self._where, lookup_timeout_s=5.0, timeout_s=PATIENCE_S)
        return RedisTier(redis, mark, case.block_bytes)

    def _prepared(self) -> tuple[Case, KvTier]:
        if self._case is None or self._tier is None:
            raise TierError("nothing is prepared")
        return self._case, self._tier


def _slots(memory: np.ndarray[tuple[int, ...], np.dtype[np.uint64]], case: Case) -> Sequence[memoryview]:
    whole = memory.data.cast("B")
    size = case.block_bytes
    return [whole[number * size : (number + 1) * size] for number in range(case.blocks)]
