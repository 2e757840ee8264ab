"""Files of blocks: ownership, leftovers of a killed worker, and eviction."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from tests.kit.engines.tier_blocks import block

from kvasir.config.spec.tiers import DiskTierSpec
from kvasir.core.identity import KvLayout
from kvasir.ports.tier import TierBlock, TierChange, TierRead, TierWrite
from kvasir_workers.tiers.blob import HEADER_BYTES, VERSION, fingerprint
from kvasir_workers.tiers.blobs.disk import DiskTier
from kvasir_workers.tiers.blobs.disk_folder import BlobFolder
from kvasir_workers.tiers.breaker import BreakerLimits

SIZE = 4096
FOOTPRINT = 8192
ROOM = 1 << 20
LAYOUT = KvLayout(16, "float32", "HND", 2, 2, 32, SIZE)
PRINT = fingerprint("model", "one", LAYOUT)
OTHER = fingerprint("model", "two", LAYOUT)


class Ticks:
    """A clock that moves by a fixed step with every reading, so that how long a call takes is how often it
    looks."""

    def __init__(self, step: float = 0.0) -> None:
        self.step = step
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self.step
        return self._now


def tier(path: Path, mark: bytes = PRINT, clock: Ticks | None = None, **spec: float) -> DiskTier:
    made = DiskTierSpec.model_validate({"path": str(path), "bytes": ROOM, **spec})
    limits = BreakerLimits(backoff_s=1.0, jitter=0.0)
    return DiskTier(made, mark, SIZE, now=clock or Ticks(), rng=Random(1), limits=limits)


def content(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def put(it: DiskTier, numbers: Sequence[int]) -> TierChange:
    return it.put([TierWrite(block(n), memoryview(content(n))) for n in numbers])


def get(it: DiskTier, numbers: Sequence[int]) -> int:
    targets = [bytearray(SIZE) for _ in numbers]
    found = it.get([TierRead(block(n).key, memoryview(t)) for n, t in zip(numbers, targets, strict=True)])
    assert all(target == content(n) for n, target in zip(numbers[:found], targets, strict=False))
    return found


def settle(it: DiskTier) -> set[TierBlock]:
    found: set[TierBlock] = set()
    while (change := it.maintain()) != TierChange() or it.maintenance_pending:
        found |= set(change.stored)
    return found


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and each.name != "lock")


def test_every_engine_has_a_folder_of_its_own_and_takes_over_what_a_dead_one_left(tmp_path: Path) -> None:
    one, two = tier(tmp_path), tier(tmp_path)
    put(one, [1])
    assert two.lookup([block(1).key]) == 0
    put(two, [2])
    one.close()
    three = tier(tmp_path)
    assert settle(three) == {block(1)}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["slot-0", "slot-1"]
    two.close()
    three.close()


def test_a_folder_with_blobs_of_ones_own_kind_is_taken_before_others(tmp_path: Path) -> None:
    ours, theirs = tier(tmp_path), tier(tmp_path, OTHER)
    put(ours, [1])
    put(theirs, [2])
    ours.close()
    theirs.close()
    again = tier(tmp_path, OTHER)
    assert settle(again) == {block(2)}
    assert len(files(tmp_path)) == 2
    again.close()


def test_what_another_model_left_in_a_folder_makes_room_before_anything_is_written(tmp_path: Path) -> None:
    before = tier(tmp_path)
    put(before, range(20))
    before.close()
    (tmp_path / "slot-0" / "notes").mkdir()
    after = tier(tmp_path, OTHER, Ticks(0.01))
    assert put(after, [1]) == TierChange()
    assert after.load().dropped_blocks == 1
    for _ in range(20):
        after.maintain()
    assert put(after, [1]).stored == (block(1),)
    assert [path.parts[-3] for path in files(tmp_path)] == [f"kv{VERSION}-{OTHER.hex()}"]
    assert (tmp_path / "slot-0" / "notes").is_dir()
    after.close()


def test_folders_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        it = tier(tmp_path / "made")
        put(it, [1])
    finally:
        os.umask(old)
    for path in [tmp_path / "made", *(tmp_path / "made").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    it.close()


@pytest.mark.parametrize("how", ["others may write", "a link"])
def test_a_folder_that_others_could_fill_is_not_used(tmp_path: Path, how: str) -> None:
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(0o700)
        (tmp_path / "slot-0").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "slot-0").mkdir()
        (tmp_path / "slot-0").chmod(0o777)
    it = tier(tmp_path)
    assert "nobody else may write" in it.load().trouble
    assert put(it, [1]) == TierChange()
    assert files(tmp_path) == []


def test_the_index_is_read_in_steps_and_blocks_are_a_miss_until_then(tmp_path: Path) -> None:
    before = tier(tmp_path)
    put(before, range(30))
    before.close()
    after = tier(tmp_path, clock=Ticks(0.004))
    assert after.lookup([block(0).key]) == 0
    found: list[TierBlock] = []
    steps = 0
    while len(found) < 30:
        found += after.maintain().stored
        steps += 1
    assert steps > 4
    assert len(set(found)) == len(found)
    assert get(after, range(30)) == 30
    after.close()


def test_a_step_that_found_nothing_to_tell_is_not_the_last_one(tmp_path: Path) -> None:
    before = tier(tmp_path)
    put(before, range(30))
    before.close()
    for path in files(tmp_path)[:20]:
        path.write_bytes(b"garbage")
    after = tier(tmp_path, clock=Ticks(0.01))
    assert after.maintain() == TierChange()
    assert after.maintenance_pending
    assert len(settle(after)) == 10
    assert not after.maintenance_pending
    after.close()


def test_a_disk_in_trouble_is_not_tended_at_once_again(tmp_path: Path) -> None:
    before = tier(tmp_path)
    put(before, range(30))
    before.close()
    after = tier(tmp_path, clock=Ticks(0.01))
    after.maintain()
    assert after.maintenance_pending
    (tmp_path / "slot-0").rename(tmp_path / "gone")
    assert get(after, [0]) == 0
    while after.maintenance_pending:
        after.maintain()
    assert after.load().trouble
    after.close()


def test_leftovers_and_strangers_among_the_files_are_deleted(tmp_path: Path) -> None:
    before = tier(tmp_path)
    put(before, [1, 2])
    before.close()
    folder = files(tmp_path)[0].parent
    (folder.parent / "incoming").write_bytes(b"half a blo")
    (folder / "readme.txt").write_text("hello")
    (folder / files(folder)[0].name.upper().replace("0", "A")).write_text("hello")
    after = tier(tmp_path)
    assert settle(after) == {block(1), block(2)}
    assert len(files(tmp_path)) == 2
    after.close()


def test_with_less_room_than_before_some_give_way_at_the_start(tmp_path: Path) -> None:
    before = tier(tmp_path)
    put(before, range(128))
    assert before.load().blocks == ROOM // FOOTPRINT == 128
    before.close()
    it = DiskTier(
        DiskTierSpec.model_construct(path=str(tmp_path), bytes=10 * FOOTPRINT, timeout_s=1.0), PRINT, SIZE
    )
    settle(it)
    assert it.load().blocks == len(files(tmp_path)) == 10
    it.close()


def test_disk_space_stays_within_its_bound(tmp_path: Path) -> None:
    it = tier(tmp_path)
    for first in range(0, 300, 20):
        put(it, range(first, first + 20))
        used = sum(path.stat().st_blocks * 512 for path in files(tmp_path))
        assert used <= it.load().bytes_used <= ROOM
    it.close()


def test_of_one_prompt_the_end_gives_way_before_the_beginning(tmp_path: Path) -> None:
    it = tier(tmp_path)
    put(it, range(128))
    assert put(it, range(500, 503)).removed == (block(127), block(126), block(125))
    # More than there is room for at once: the beginning is kept.
    it.drop([each.key for each in it.held()])
    assert put(it, range(200)).stored == tuple(block(number) for number in range(128))
    assert it.load().dropped_blocks == 72
    it.close()


def test_a_block_that_came_back_after_it_gave_way_outlasts_others(tmp_path: Path) -> None:
    it = tier(tmp_path)
    put(it, range(128))
    assert put(it, [500]).removed == (block(127),)
    put(it, [127])
    for number in range(1000, 1200):
        put(it, [number])
    assert it.lookup([block(127).key]) == 1
    assert it.lookup([block(100).key]) == 0
    it.close()


def test_a_block_that_does_not_fit_at_all_is_said_to_be_too_large(tmp_path: Path) -> None:
    it = DiskTier(DiskTierSpec(path=str(tmp_path), bytes=1 << 20), PRINT, 4 << 20)
    for _ in range(3):
        it.maintain()
        assert "raise tiers.disk.bytes" in it.load().trouble
    assert it.put([TierWrite(block(1), memoryview(bytes(4 << 20)))]) == TierChange()
    it.close()


def test_a_read_that_passes_its_deadline_is_a_miss_and_the_disk_is_left_alone(tmp_path: Path) -> None:
    clock = Ticks()
    it = tier(tmp_path, clock=clock, timeout_s=0.5)
    put(it, [1, 2])
    clock.step = 1.0
    assert get(it, [1, 2]) == 0
    clock.step = 0.0
    assert "took longer than 0.5 s" in it.load().trouble
    assert it.lookup([block(1).key]) == 0
    assert it.load().failures == 1
    clock.step = 0.3
    it.maintain()
    it.maintain()
    it.maintain()
    clock.step = 0.0
    assert it.load().trouble == ""
    assert get(it, [1, 2]) == 2
    it.close()


def test_blocks_that_were_read_before_the_deadline_count(tmp_path: Path) -> None:
    clock = Ticks()
    it = tier(tmp_path, clock=clock, timeout_s=0.5)
    put(it, range(20))
    clock.step = 0.1
    assert 0 < get(it, range(20)) < 20
    assert it.load().trouble == ""
    it.close()


def test_writes_that_pass_the_deadline_are_dropped(tmp_path: Path) -> None:
    clock = Ticks()
    it = tier(tmp_path, clock=clock, timeout_s=0.5)
    it.maintain()
    clock.step = 0.1
    stored = put(it, range(20)).stored
    assert stored == tuple(block(number) for number in range(len(stored)))
    assert 0 < len(stored) < 20
    assert it.load().dropped_blocks == 20 - len(stored)
    it.close()


def test_a_large_block_is_read_in_pieces_with_a_look_at_the_clock_before_each(tmp_path: Path) -> None:
    folder = BlobFolder.claim(str(tmp_path), PRINT)
    data = Random(1).randbytes(20 << 20)
    folder.write(block(1).key, bytes(HEADER_BYTES), memoryview(data))
    target, looks = bytearray(len(data)), list[int]()
    found = folder.read(block(1).key, memoryview(target), lambda: looks.append(0))
    assert found == (bytes(HEADER_BYTES), HEADER_BYTES + len(data))
    assert target == data
    assert len(looks) == 3
    folder.close()
