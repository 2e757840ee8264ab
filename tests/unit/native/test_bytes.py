"""Copies and checksums of KV bytes: native and twin agree, and every changed byte is detected."""

from __future__ import annotations

import subprocess
import sys
from array import array
from random import Random
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir import native
from kvasir.native import _twin_bytes

BOTH = pytest.mark.parametrize("core", [native, _twin_bytes], ids=["native", "twin"])
Bytes = npt.NDArray[np.uint8]

LANES = native.CHECKSUM_LANES
PINNED = [0x2A85E6F57FF60D01, 0x8D97EA1B57274429]


def address_of(memory: Bytes) -> int:
    return int(memory.ctypes.data)


def random_bytes(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def checksums(core: ModuleType, memory: Bytes, lengths: list[int], group: int, shift: int = 0) -> list[int]:
    """Of pieces that follow each other from `shift` bytes into the memory on."""
    ends = np.cumsum([shift, *lengths])
    at = array("Q", (address_of(memory) + int(end) for end in ends[:-1]))
    return list(core.checksum_pieces(at, array("Q", lengths), group))


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Bytes, list[int], int, int]:
    """Memory, lengths, a group that divides their count, and how far from an aligned address it begins."""
    group = draw(st.integers(1, 4))
    count = group * draw(st.integers(0, 3))
    # Long ones are read in another way than short ones.
    lanes = st.one_of(st.integers(0, 70), st.integers(4090, 4110), st.integers(16_380, 16_400))
    lengths = [4 * draw(lanes) for _ in range(count)]
    shift = draw(st.integers(0, 9))
    return random_bytes(draw(st.integers(0, 99)), shift + sum(lengths) + 1), lengths, group, shift


@given(pieces())
def test_both_implementations_sum_alike(drawn: tuple[Bytes, list[int], int, int]) -> None:
    memory, lengths, group, shift = drawn
    mine = checksums(native, memory, lengths, group, shift)
    assert mine == checksums(_twin_bytes, memory, lengths, group, shift)
    assert len(mine) == len(lengths) // group


@BOTH
def test_the_format_is_pinned(core: ModuleType) -> None:
    memory = np.arange(64, dtype=np.uint8)
    assert checksums(core, memory, [16, 16, 32, 0], 2) == PINNED


@BOTH
def test_a_checksum_is_what_the_contract_says(core: ModuleType) -> None:
    memory, lengths = random_bytes(1, 300 * 4), [100 * 4, 0, 200 * 4]
    weights, lanes = list(core.checksum_weights(200)), memory.view("<u4").tolist()
    expected = core.CHECKSUM_SEED
    for first, last in ((0, 100), (100, 100), (100, 300)):
        total = sum(x * w for x, w in zip(lanes[first:last], weights, strict=False))
        expected = (expected * core.CHECKSUM_FACTOR + total + 1) % 2**64
    assert checksums(core, memory, lengths, 3) == [expected]


@given(pieces().filter(lambda drawn: sum(drawn[1]) > 0), st.data())
def test_no_flipped_bit_goes_unseen(drawn: tuple[Bytes, list[int], int, int], data: st.DataObject) -> None:
    memory, lengths, group, shift = drawn
    before = checksums(native, memory, lengths, group, shift)
    at = data.draw(st.integers(0, sum(lengths) - 1))
    memory[shift + at] ^= 1 << data.draw(st.integers(0, 7))
    after = checksums(native, memory, lengths, group, shift)
    hit = int(np.searchsorted(np.cumsum(lengths), at, side="right")) // group
    assert [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [hit]


def test_pieces_and_lanes_that_changed_places_are_seen() -> None:
    memory = random_bytes(2, 64)
    halves, lanes = memory.copy(), memory.copy()
    halves[:32], halves[32:] = memory[32:], memory[:32]
    lanes[:4], lanes[4:8] = memory[4:8], memory[:4]
    sums = {tuple(checksums(native, each, [32, 32], 2)) for each in (memory, halves, lanes)}
    assert len(sums) == 3


def test_where_a_group_is_divided_makes_a_difference() -> None:
    memory = np.zeros(64, dtype=np.uint8)
    assert checksums(native, memory, [64], 1) != checksums(native, memory, [32, 32], 2)


@BOTH
def test_weights_are_odd_and_begin_again_after_the_last(core: ModuleType) -> None:
    weights = core.checksum_weights(LANES + 3)
    assert all(weight % 2 for weight in weights[:100])
    assert weights[LANES:] == weights[:3]
    assert len(set(weights[:LANES])) == LANES
    assert list(core.checksum_weights(0)) == []


def test_native_and_twin_have_the_same_weights_and_constants() -> None:
    assert native.checksum_weights(LANES) == _twin_bytes.checksum_weights(LANES)
    for name in ("CHECKSUM_SEED", "CHECKSUM_FACTOR", "CHECKSUM_LANES"):
        assert getattr(native, name) == getattr(_twin_bytes, name)
    assert native.CHECKSUM_FACTOR % 2 == 1


def test_a_piece_longer_than_the_table_of_weights_is_summed_alike() -> None:
    memory = random_bytes(3, 4 * LANES + 4 * 5003)
    assert checksums(native, memory, [len(memory)], 1) == checksums(_twin_bytes, memory, [len(memory)], 1)


@BOTH
@pytest.mark.parametrize(
    ("addresses", "lengths", "group", "what"),
    [
        ([64, 64], [4], 1, "one length"),
        ([64, 64], [4, 4], 0, "group"),
        ([64, 64, 64], [4, 4, 4], 2, "group"),
        ([64], [6], 1, "multiples of 4"),
        ([0], [4], 1, "no address"),
    ],
)
def test_sums_of_what_cannot_be_summed_are_refused(
    core: ModuleType, addresses: list[int], lengths: list[int], group: int, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        core.checksum_pieces(array("Q", addresses), array("Q", lengths), group)


@BOTH
def test_buffers_of_other_items_are_refused(core: ModuleType) -> None:
    good, bad = array("Q", [64]), array("I", [64])
    with pytest.raises(ValueError, match="addresses must be"):
        core.checksum_pieces(bad, good, 1)
    with pytest.raises(ValueError, match="targets must be"):
        core.copy_pieces(good, bad, good)


@BOTH
@pytest.mark.parametrize("seed", range(20))
def test_copies_put_every_byte_in_its_place_and_no_other(core: ModuleType, seed: int) -> None:
    rng = Random(seed)
    source, target = random_bytes(seed, 4000), random_bytes(seed + 1000, 4000)
    expected = target.copy()
    origins, goals, sizes = array("Q"), array("Q"), array("Q")
    origin = goal = 0
    while True:
        # Some pieces follow on both sides, others on one; some are empty.
        origin += rng.choice((0, 0, 0, rng.randrange(50)))
        goal += rng.choice((0, 0, 0, rng.randrange(50)))
        size = rng.choice((0, rng.randrange(200)))
        if max(origin, goal) + size > 4000:
            break
        origins.append(address_of(source) + origin if size else rng.choice((0, 5)))
        goals.append(address_of(target) + goal if size else rng.choice((0, 7)))
        sizes.append(size)
        expected[goal : goal + size] = source[origin : origin + size]
        origin, goal = origin + size, goal + size
    order = list(range(len(sizes)))
    if seed % 2:
        rng.shuffle(order)
    core.copy_pieces(*(array("Q", (column[n] for n in order)) for column in (origins, goals, sizes)))
    assert np.array_equal(target, expected)


@BOTH
def test_copies_that_are_refused_copy_nothing(core: ModuleType) -> None:
    source, target = random_bytes(5, 16), np.zeros(16, dtype=np.uint8)
    a, b = address_of(source), address_of(target)
    for origins, goals, sizes in (([a, 0], [b, b], [8, 8]), ([a, a], [b, 0], [8, 8]), ([a], [b, b], [8, 8])):
        with pytest.raises(ValueError, match=r"no address|one length"):
            core.copy_pieces(array("Q", origins), array("Q", goals), array("Q", sizes))
    assert not target.any()


def test_threads_that_need_the_first_weights_at_once_agree() -> None:
    """In a process of its own, where the table of weights is still empty."""
    code = """
import threading, numpy as np
from array import array
from kvasir import native
from kvasir.native import _twin_bytes
memory = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
at, wrong = array("Q", [int(memory.ctypes.data)]), []
sizes = list(range(4, 1 << 20, 99_996))
expected = {size: _twin_bytes.checksum_pieces(at, array("Q", [size]), 1) for size in sizes}
start = threading.Barrier(8)
def check(sizes):
    start.wait()
    wrong.extend(s for s in sizes if native.checksum_pieces(at, array("Q", [s]), 1) != expected[s])
threads = [threading.Thread(target=check, args=(sizes[n:] + sizes[:n],)) for n in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not wrong, wrong
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
