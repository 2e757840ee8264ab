"""The worker's record of its blocks: batches without gaps, and snapshots of a changing cache."""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from random import Random

import msgspec
import pytest

from kvasir.core.errors import CapacityError
from kvasir.core.kv import KvBatch, KvEventKind, KvSnapshotPart, Medium
from kvasir.core.requests import token_ids
from kvasir.native import PrefixTree, chain_hashes, root_hash
from kvasir_platform.sim.core.virtual_loop import run_virtual
from kvasir_workers.server.holdings import INCOMPLETE, Holdings

BLOCK = 4
EPOCH = 7


def root_of(salt: str, adapter: str) -> int:
    return root_hash("m", salt, adapter)


class Follower:
    """A router's copy: whatever it is handed, applied in order."""

    def __init__(self, ranks: int = 1) -> None:
        self.batches: list[KvBatch] = []
        self._tree = PrefixTree(1 << 20, 0)
        self._groups = [self._tree.add_group() for _ in range(ranks)]

    def __call__(self, batch: KvBatch) -> None:
        self.batches.append(batch)
        self.apply(batch.log)

    def apply(self, log: bytes) -> None:
        self._tree.apply(self._groups, log)

    def held(self, rank: int = 0, medium: Medium = Medium.DEVICE) -> int:
        return self._tree.held(self._groups[rank], medium)

    def depth(self, tokens: Sequence[int], rank: int = 0, salt: str = "") -> int:
        depths = array("I", bytes(16 * len(self._groups)))
        self._tree.match(chain_hashes(token_ids(tokens), BLOCK, root_of(salt, "")), depths)
        return depths[4 * self._groups[rank]]


def holdings(ranks: int = 1, **limits: float) -> tuple[Holdings, Follower]:
    made = Holdings(ranks, root_of, **limits)  # type: ignore[arg-type]  # bounds are numbers
    made.begin(EPOCH)
    follower = Follower(ranks)
    made.subscribe(follower)
    return made, follower


def store(to: Holdings, first_key: int, tokens: Sequence[int], *, rank: int = 0, salt: str = "") -> None:
    keys = array("Q", range(first_key, first_key + len(tokens) // BLOCK))
    to.store(rank, None, keys, token_ids(tokens), BLOCK, salt=salt)


def test_a_flush_hands_over_all_changes_as_one_numbered_batch() -> None:
    async def main() -> None:
        record, follower = holdings()
        store(record, 1, range(8))
        store(record, 10, range(100, 112), salt="s")
        record.remove(0, array("Q", [12]))
        record.flush()
        record.flush()
        store(record, 20, range(200, 204))
        record.flush()
        assert [(b.epoch, b.sequence) for b in follower.batches] == [(EPOCH, 1), (EPOCH, 2)]
        assert follower.held() == record.held(0) == 5
        assert (follower.depth(range(8)), follower.depth(range(100, 112), salt="s")) == (2, 2)

    run_virtual(main())


def test_a_change_that_nobody_flushes_is_handed_over_within_milliseconds() -> None:
    async def main() -> None:
        record, follower = holdings(delay_s=0.02)
        store(record, 1, range(4))
        await asyncio.sleep(0.019)
        store(record, 2, range(10, 14))
        assert follower.batches == []
        await asyncio.sleep(0.002)
        assert [b.sequence for b in follower.batches] == [1]
        assert follower.held() == 2
        await asyncio.sleep(1.0)
        assert len(follower.batches) == 1

    run_virtual(main())


def test_a_log_that_grows_large_does_not_wait() -> None:
    async def main() -> None:
        record, follower = holdings(max_log_bytes=1024)
        for first in range(0, 400, 8):
            store(record, first, range(100 * first, 100 * first + 8 * BLOCK))
        assert len(follower.batches) > 2
        assert max(len(batch.log) for batch in follower.batches) <= 2048
        assert [b.sequence for b in follower.batches] == list(range(1, len(follower.batches) + 1))

    run_virtual(main())


def test_nothing_is_kept_for_a_follower_that_there_is_not() -> None:
    async def main() -> None:
        record, follower = holdings()
        record.subscribe(None)
        store(record, 1, range(4))
        record.flush()
        record.subscribe(follower)
        store(record, 2, range(10, 14))
        record.flush()
        # It can tell that something came before.
        assert [b.sequence for b in follower.batches] == [2]

    run_virtual(main())


async def collect(record: Holdings) -> list[KvSnapshotPart]:
    async with aclosing(record.snapshot()) as parts:
        return [part async for part in parts]


def test_a_snapshot_of_nothing_is_one_empty_last_part() -> None:
    async def main() -> None:
        record, _ = holdings()
        assert await collect(record) == [KvSnapshotPart(EPOCH, 0, b"", last=True)]

    run_virtual(main())


def test_a_snapshot_comes_in_parts_and_lets_the_loop_run_between_them() -> None:
    async def main() -> None:
        record, _ = holdings(ranks=2, part_blocks=16)
        for first in range(0, 400, 4):
            store(record, first, range(100 * first, 100 * first + 4 * BLOCK), rank=first % 8 // 4)
        record.flush()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        parts = await collect(record)
        ticking.cancel()
        assert ticks >= len(parts) - 1 > 5
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert {(part.epoch, part.sequence) for part in parts} == {(EPOCH, 1)}
        late = Follower(2)
        for part in parts:
            late.apply(part.log)
        assert (late.held(0), late.held(1)) == (record.held(0), record.held(1)) == (200, 200)

    run_virtual(main())


def test_changes_of_tiers_reach_followers_and_snapshots_and_survive_the_engines_cache() -> None:
    async def main() -> None:
        record, follower = holdings()
        names = chain_hashes(token_ids(range(8)), BLOCK, root_of("", ""))
        head = struct.pack("<BBHIQ", KvEventKind.STORED, Medium.DISK, 0, len(names), root_of("", ""))
        event = {"type": "KvasirTierChanged", "log": head + names.tobytes()}
        store(record, 1, range(8))
        record.ingest(0, msgspec.msgpack.encode([1.0, [event], 0]))
        record.ingest(0, msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0]))
        record.flush()
        (part,) = await collect(record)
        late = Follower()
        late.apply(part.log)
        for each in (record, follower, late):
            assert (each.held(0, Medium.DEVICE), each.held(0, Medium.DISK)) == (0, 2)

    run_virtual(main())


class Churn:
    """An engine that stores and evicts at random, over prompts with common beginnings."""

    def __init__(self, record: Holdings, rng: Random) -> None:
        self.prompts = [[rng.randrange(3) for _ in range(5 * BLOCK)] for _ in range(40)]
        self._record = record
        self._rng = rng
        self._live: dict[int, int] = {}

    def change(self, times: int) -> None:
        for _ in range(times):
            roll = self._rng.random()
            if roll < 0.02:
                self._record.clear(0)
                self._live.clear()
            elif roll < 0.5 and self._live:
                key = self._rng.choice(list(self._live))
                self._record.remove(0, array("Q", range(key, key + self._live.pop(key))))
            else:
                self._store()
            if self._rng.random() < 0.3:
                self._record.flush()

    def _store(self) -> None:
        at, blocks = self._rng.randrange(len(self.prompts)), self._rng.randrange(1, 6)
        if 10 * at not in self._live:
            store(self._record, 10 * at, self.prompts[at][: blocks * BLOCK])
            self._live[10 * at] = blocks


@pytest.mark.parametrize("seed", range(30))
def test_a_snapshot_and_what_follows_it_are_the_state_whatever_changes_meanwhile(seed: int) -> None:
    async def main() -> None:
        rng = Random(seed)
        record, follower = holdings(part_blocks=4)
        churn = Churn(record, rng)
        churn.change(100)
        late, base = Follower(), -1
        async with aclosing(record.snapshot()) as parts:
            async for part in parts:
                base = part.sequence
                late.apply(part.log)
                churn.change(rng.randrange(6))
        record.flush()
        for batch in follower.batches:
            if batch.sequence > base:
                late.apply(batch.log)
        assert late.held() == follower.held() == record.held(0)
        assert [late.depth(p) for p in churn.prompts] == [follower.depth(p) for p in churn.prompts]

    run_virtual(main())


def test_a_loss_begins_an_epoch_at_once_in_which_nothing_is_told_until_all_is_known_again() -> None:
    async def main() -> None:
        record, follower = holdings()
        store(record, 1, range(8))
        record.flush()
        store(record, 3, range(20, 24))
        record.lose("events 5 to 7 are lost")
        record.lose("and more")
        assert record.incomplete == "events 5 to 7 are lost"
        assert [(b.epoch, b.sequence, b.log) for b in follower.batches[1:]] == [(EPOCH + 1, 1, b"")]
        with pytest.raises(CapacityError, match="events 5 to 7") as refused:
            await collect(record)
        assert refused.value.code == INCOMPLETE
        record.clear(0)
        store(record, 9, range(30, 34))
        record.flush()
        assert len(follower.batches) == 2
        record.restore()
        assert record.incomplete is None
        (part,) = await collect(record)
        assert (part.epoch, part.sequence, part.last) == (EPOCH + 1, 1, True)
        late = Follower()
        late.apply(part.log)
        store(record, 11, range(40, 44))
        record.flush()
        assert follower.batches[-1].sequence == 2
        late.apply(follower.batches[-1].log)
        assert late.held() == record.held(0) == 2

    run_virtual(main())


@pytest.mark.parametrize("restored", [True, False])
def test_a_snapshot_that_is_overtaken_by_a_loss_is_broken_off(restored: bool) -> None:
    async def main() -> None:
        record, _ = holdings(part_blocks=1)
        for first in range(0, 100, 4):
            store(record, first, range(100 * first, 100 * first + 4 * BLOCK))
        async with aclosing(record.snapshot()) as parts:
            seen = [await anext(parts)]
            record.lose("lost")
            if restored:
                record.restore()
            with pytest.raises(CapacityError):
                seen += [part async for part in parts]
        assert not any(part.last for part in seen)

    run_virtual(main())


def test_a_record_that_has_not_begun_is_refused_with_the_reason() -> None:
    async def main() -> None:
        record = Holdings(1, root_of)
        record.begin(EPOCH, incomplete="the engine starts")
        with pytest.raises(CapacityError, match="the engine starts"):
            await collect(record)

    run_virtual(main())
