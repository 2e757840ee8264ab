"""Blocks of a KV cache are copied through slots of shared memory and back, by every copier that runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ports.transfer import KvRegion
from kvasir_workers.tiers.copier import BlockCopier, DeviceCopier, HostCopier, SlotPart, runs_of
from kvasir_workers.tiers.memory import SharedMemory

torch = pytest.importorskip("torch")

BLOCKS, SLOTS, RANKS = 12, 10, 2
SHAPES = ((3, 4), (3, 4), (5, 2))


class Rank:
    """One rank's layers, the middle one with its axes the other way round."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers = [torch.rand((BLOCKS, *shape), generator=generator) for shape in SHAPES]
        self.layers[1] = self.layers[1].transpose(1, 2)
        self.part_bytes = sum(layer[0].numel() * 4 for layer in self.layers)

    def regions(self) -> list[KvRegion]:
        return [KvRegion(layer.data_ptr(), layer[0].numel() * 4, BLOCKS) for layer in self.layers]

    def content(self, blocks: Sequence[int]) -> list[list[Any]]:
        return [[layer[block].clone() for layer in self.layers] for block in blocks]


def host(rank: Rank, memory: SharedMemory, offset: int) -> BlockCopier:
    return HostCopier(rank.regions(), SlotPart(memory, offset), lambda: 0.0)


def staged(rank: Rank, memory: SharedMemory, offset: int) -> BlockCopier:
    """What copies on a device, through a buffer of two blocks, where the device is the CPU."""
    return DeviceCopier(rank.layers, BLOCKS, SlotPart(memory, offset), lambda: 0.0, 2 * rank.part_bytes)


Kind = Callable[[Rank, SharedMemory, int], BlockCopier]
KINDS = pytest.mark.parametrize("kind", [host, staged])


def equal(one: list[list[Any]], other: list[list[Any]]) -> bool:
    return all(
        torch.equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


@KINDS
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_blocks_of_every_rank_come_back_into_other_blocks(kind: Kind, ranks: int) -> None:
    sides = [Rank(seed) for seed in range(ranks)]
    memory = SharedMemory.create(SLOTS, ranks * sides[0].part_bytes)
    copiers = [kind(side, memory, number * side.part_bytes) for number, side in enumerate(sides)]
    blocks, slots, targets = [7, 0, 3, 11, 4], [2, 3, 4, 9, 0], [5, 6, 1, 2, 8]
    before = [side.content(blocks) for side in sides]
    untouched = [side.content([9, 10]) for side in sides]
    for copier in copiers:
        copier.store(blocks, slots)
        copier.fence()
    for copier in copiers:
        copier.load(slots, targets)
    for side, content, rest in zip(sides, before, untouched, strict=True):
        assert equal(side.content(targets), content)
        assert equal(side.content([9, 10]), rest)
    memory.close()


@KINDS
def test_each_copy_is_reported_once(kind: Kind) -> None:
    side = Rank(1)
    copier = kind(side, SharedMemory.create(SLOTS, side.part_bytes), 0)
    tickets = [copier.store([1], [1]), copier.load([1], [2]), copier.store([], [])]
    assert [copied.ticket for copied in copier.poll()] == tickets
    assert copier.poll() == []


def test_both_kinds_lay_out_a_slot_alike() -> None:
    side = Rank(3)
    memory = SharedMemory.create(SLOTS, RANKS * side.part_bytes)
    host(side, memory, side.part_bytes).store([6, 2], [1, 5])
    first = bytes(memory.view)
    memory.view[:] = bytes(len(first))
    staged(side, memory, side.part_bytes).store([6, 2], [1, 5])
    assert bytes(memory.view) == first


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_cover_every_slot_in_order_and_are_as_long_as_can_be(slots: list[int]) -> None:
    runs = runs_of(slots)
    assert [slot + more for _, slot, count in runs for more in range(count)] == slots
    assert [first for first, _, _ in runs] == [sum(c for _, _, c in runs[:at]) for at in range(len(runs))]
    assert all(runs[at][1] + runs[at][2] != runs[at + 1][1] for at in range(len(runs) - 1))


_OTHER_PROCESS = """
import sys
from kvasir_workers.tiers.memory import SharedMemory, SharedName
memory = SharedMemory.open(SharedName(sys.argv[1], 4, 16))
assert bytes(memory.slot_view(2)) == b"x" * 16
memory.slot_view(3)[:] = b"y" * 16
"""


def test_another_process_reads_and_writes_the_same_slots() -> None:
    memory = SharedMemory.create(4, 16)
    memory.slot_view(2)[:] = b"x" * 16
    subprocess.run([sys.executable, "-c", _OTHER_PROCESS, memory.name.path], check=True)
    assert bytes(memory.slot_view(3)) == b"y" * 16
    descriptor = int(memory.name.path.rsplit("/", 1)[1])
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 8)
    memory.close()
    memory.close()
