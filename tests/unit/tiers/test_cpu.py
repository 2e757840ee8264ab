"""The tier in host memory gives back what it was given, and nothing else."""

from __future__ import annotations

from itertools import count
from mmap import mmap

import pytest

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.tier import KEY_BYTES, Block, Change, Read, Write
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.cpu import CpuTier
from kvasir_workers.tiers.eviction import Lru

SIZE = 64


def _block(number: int) -> Block:
    return Block(bytes([number]) * KEY_BYTES, number, number - 1)


def _write(number: int) -> Write:
    return Write(_block(number), memoryview(bytes([number + 100]) * SIZE))


def _tier(slots: int) -> tuple[CpuTier, Arena]:
    arena = Arena(slots, Lru())
    ticks = count()
    return CpuTier(arena, memoryview(bytearray(slots * SIZE)), SIZE, lambda: float(next(ticks))), arena


def _read(tier: CpuTier, *numbers: int) -> list[bytes]:
    targets = [bytearray(SIZE) for _ in numbers]
    read = tier.get([Read(_block(n).key, memoryview(t)) for n, t in zip(numbers, targets, strict=True)])
    return [bytes(target) for target in targets[:read]]


def test_blocks_come_back_byte_for_byte_up_to_the_first_that_is_missing() -> None:
    tier, _ = _tier(4)
    assert tier.put([_write(1), _write(2), _write(4)]) == Change((_block(1), _block(2), _block(4)), ())
    assert tier.lookup([_block(n).key for n in (1, 2, 3, 4)]) == 2
    assert _read(tier, 1, 2, 3, 4) == [bytes([101]) * SIZE, bytes([102]) * SIZE]
    assert set(tier.held()) == {_block(1), _block(2), _block(4)}


def test_a_block_that_is_there_is_not_written_again_but_used() -> None:
    tier, _ = _tier(2)
    tier.put([_write(1), _write(2)])
    other = Write(_block(1), memoryview(bytes(SIZE)))
    assert tier.put([other]) == Change()
    assert tier.put([_write(3)]) == Change((_block(3),), (_block(2),))
    assert _read(tier, 1) == [bytes([101]) * SIZE]


def test_what_was_read_gives_way_after_what_was_not() -> None:
    tier, _ = _tier(2)
    tier.put([_write(1), _write(2)])
    _read(tier, 1)
    assert tier.put([_write(3)]).removed == (_block(2),)


def test_a_block_without_a_slot_is_not_kept_and_counted() -> None:
    tier, arena = _tier(1)
    tier.put([_write(1)])
    arena.pin(0)
    assert tier.put([_write(2)]) == Change()
    assert tier.load().dropped_blocks == 1
    assert _read(tier, 1) == [bytes([101]) * SIZE]


def test_a_block_that_is_being_filled_is_left_to_who_fills_it() -> None:
    tier, arena = _tier(2)
    slot = arena.reserve(_block(1))
    assert slot is not None
    assert tier.put([_write(1)]) == Change()
    assert tier.lookup([_block(1).key]) == 0
    tier.slot_view(slot)[:] = bytes(SIZE)
    arena.commit(slot)
    assert _read(tier, 1) == [bytes(SIZE)]


@pytest.mark.parametrize("size", [0, SIZE - 4, SIZE + 4])
def test_buffers_of_another_size_are_refused_and_counted(size: int) -> None:
    tier, _ = _tier(1)
    assert tier.put([Write(_block(1), memoryview(bytes(size)))]) == Change()
    tier.put([_write(1)])
    assert tier.get([Read(_block(1).key, memoryview(bytearray(size)))]) == 0
    assert tier.get([Read(_block(1).key, memoryview(bytes(SIZE)))]) == 0
    strided = memoryview(bytearray(2 * SIZE))[::2]
    assert tier.get([Read(_block(1).key, strided)]) == 0
    assert tier.load().failures == 4


def test_what_others_change_in_the_arena_is_told_too() -> None:
    tier, arena = _tier(1)
    tier.put([_write(1)])
    arena.drop(_block(1).key)
    assert tier.tend() == Change((), (_block(1),))
    assert tier.tend() == Change()


def test_dropped_blocks_are_gone_and_said_to_be() -> None:
    tier, _ = _tier(2)
    tier.put([_write(1), _write(2)])
    assert tier.drop([_block(1).key, _block(9).key]) == Change((), (_block(1),))
    assert _read(tier, 1) == []


def test_the_load_counts_what_happened() -> None:
    tier, _ = _tier(2)
    tier.put([_write(1), _write(2), _write(3)])
    _read(tier, 2, 3)
    _read(tier, 9)
    assert tier.load() == TierLoad(
        Medium.CPU,
        blocks=2,
        bytes_used=2 * SIZE,
        bytes_capacity=2 * SIZE,
        loads=1,
        loaded_blocks=2,
        loaded_bytes=2 * SIZE,
        load_s=1.0,
        stored_blocks=3,
        stored_bytes=3 * SIZE,
        evicted_blocks=1,
    )


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (memoryview(bytearray(2 * SIZE - 1)), SIZE),
        (memoryview(bytes(2 * SIZE)), SIZE),
        (memoryview(bytearray(SIZE)), 0),
    ],
)
def test_memory_that_does_not_do_is_refused(memory: memoryview, size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        CpuTier(Arena(2, Lru()), memory, size, float)


def test_a_closed_tier_holds_nothing_keeps_nothing_and_lets_go_of_the_memory() -> None:
    memory = mmap(-1, 2 * SIZE)
    view = memoryview(memory)
    arena = Arena(2, Lru())
    tier = CpuTier(arena, view, SIZE, float)
    tier.put([_write(1)])
    slot = arena.reserve(_block(2))
    tier.close()
    tier.close()
    view.release()
    memory.close()
    assert slot is not None
    arena.commit(slot)
    assert tier.put([_write(3)]).removed == (_block(1),)
    assert _read(tier, 1) == _read(tier, 2) == []
    assert tier.lookup([_block(2).key]) == 0
