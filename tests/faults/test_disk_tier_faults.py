"""A failing disk is a cache miss: no wrong bytes, no error, one log line, and recovery with the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.kit.engines.tier_blocks import (
    FOOTPRINT,
    LIMITS,
    PRINT,
    SIZE,
    WRONG_BLOBS,
    Lines,
    asked_in_vain,
    block,
    get,
    put,
    recover,
    tend_until,
)
from tests.kit.lab.small_disk import SmallDisk, available

from kvasir.config.spec.tiers import DiskTierSpec
from kvasir.ports.tier import TierChange
from kvasir_workers.tiers.blobs.disk import DiskTier


def disk_tier(path: Path, room: int = 100) -> DiskTier:
    spec = DiskTierSpec(path=str(path), bytes=room * FOOTPRINT, timeout_s=20.0)
    return DiskTier(spec, PRINT, SIZE, rng=Random(1), limits=LIMITS)


def file_of(tier: DiskTier, path: Path, number: int) -> Path:
    (found,) = path.rglob(block(number).key.hex())
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A filesystem of a megabyte of its own."""
    if (missing := available()) is not None:
        pytest.skip(missing)
    path = tmp_path / "disk"
    path.mkdir()
    with SmallDisk(path, 1 << 20) as disk:
        yield disk


def test_a_full_disk_takes_nothing_more_and_is_still_read(small_disk: SmallDisk, lines: Lines) -> None:
    tier = disk_tier(small_disk.path)
    assert len(put(tier, 1, 2).stored) == 2
    small_disk.fill()
    for number in range(10, 30):
        assert put(tier, number) == TierChange()
    assert "free space there, or lower tiers.disk.bytes" in tier.load().trouble
    assert tier.load().readable
    assert tier.load().failures == 1
    assert list(small_disk.path.rglob("incoming")) == []
    assert get(tier, 1, 2) == 2
    tend_until(tier, lambda: tier.load().failures >= 3)
    small_disk.grow()
    recover(tier)
    assert put(tier, 10).stored == (block(10),)
    assert get(tier, 1, 2, 10) == 3
    down, up = lines.take()
    assert "No space left on device" in down
    assert "for writing, is used again" in up
    tier.close()


def test_a_disk_that_becomes_read_only_is_still_read_also_after_a_restart(
    small_disk: SmallDisk, lines: Lines
) -> None:
    tier = disk_tier(small_disk.path)
    put(tier, 1, 2)
    small_disk.forbid_writes()
    for number in range(10, 30):
        assert put(tier, number) == TierChange()
    assert "mount it writable" in tier.load().trouble
    assert get(tier, 1, 2) == 2
    tier.close()
    assert len(lines.take()) == 1
    again = disk_tier(small_disk.path)
    tend_until(again, lambda: True)
    assert "mount it writable" in again.load().trouble
    assert get(again, 1, 2) == 2
    assert put(again, 10) == TierChange()
    small_disk.allow_writes()
    recover(again)
    assert put(again, 10).stored == (block(10),)
    assert len(lines.take()) == 2
    again.close()


def test_a_folder_that_vanishes_is_told_and_made_anew(tmp_path: Path, lines: Lines) -> None:
    tier = disk_tier(tmp_path / "tier")
    put(tier, 1, 2)
    shutil.rmtree(tmp_path / "tier" / "slot-0")
    assert get(tier, 1) == 0
    assert asked_in_vain(tier) == 0
    assert tier.load().failures == 1
    recover(tier)
    assert list(tier.held()) == []
    assert put(tier, 3).stored == (block(3),)
    assert get(tier, 3) == 1
    assert len(lines.take()) == 2
    tier.close()


def test_a_path_that_is_no_folder_is_told_and_used_once_it_is_one(tmp_path: Path, lines: Lines) -> None:
    path = tmp_path / "tier"
    path.write_text("a file")
    tier = disk_tier(path)
    assert asked_in_vain(tier) == 0
    assert str(path) in tier.load().trouble
    path.unlink()
    recover(tier)
    put(tier, 1)
    assert get(tier, 1) == 1
    assert len(lines.take()) == 2
    tier.close()


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("kind", WRONG_BLOBS)
def test_a_wrong_file_is_a_miss_deleted_and_written_again(
    tmp_path: Path, lines: Lines, kind: str, restarted: bool
) -> None:
    reason, raw = WRONG_BLOBS[kind]
    tier = disk_tier(tmp_path)
    put(tier, 1, 2, 3)
    path = file_of(tier, tmp_path, 2)
    path.write_bytes(raw)
    if restarted:
        tier.close()
        tier = disk_tier(tmp_path)
        tend_until(tier, lambda: True)
    assert get(tier, 1, 2, 3) == 1
    assert (tier.load().corrupt_blocks, tier.load().trouble) == (1, "")
    (line,) = lines.take()
    assert f"not the block it should be ({reason})" in line
    assert not path.exists()
    put(tier, 2)
    assert get(tier, 1, 2, 3) == 3
    tier.close()


def test_two_files_that_changed_places_are_both_misses_for_one_reason(tmp_path: Path, lines: Lines) -> None:
    tier = disk_tier(tmp_path)
    put(tier, 1, 2, 3)
    one, two = file_of(tier, tmp_path, 1), file_of(tier, tmp_path, 2)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert get(tier, 1) == get(tier, 2) == 0
    assert get(tier, 3) == 1
    assert tier.load().corrupt_blocks == 2
    (line,) = lines.take()
    assert "(key)" in line
    tier.close()


@pytest.mark.parametrize("how", ["deleted", "a folder", "a link to a sound one"])
def test_a_file_that_is_none_any_more_is_a_miss(tmp_path: Path, how: str) -> None:
    tier = disk_tier(tmp_path)
    put(tier, 1, 2, 3)
    path = file_of(tier, tmp_path, 2)
    if how == "a link to a sound one":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        if how == "a folder":
            path.mkdir()
    assert get(tier, 1, 2, 3) == 1
    assert get(tier, 3) == 1
    assert tier.maintain().removed == (block(2),)
    assert tier.load().trouble == ""
    tier.close()
