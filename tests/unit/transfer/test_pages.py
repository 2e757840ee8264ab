"""Lease pages: only completely written pages parse, and extents never overlap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_workers.transfer.nixl.leases import Extent
from kvasir_workers.transfer.nixl.pages import PageMemory, PageWriter, page_bytes, parse


def written(ids: list[int], total: int, parts: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    memory = np.zeros(page_bytes(total, parts), dtype=np.uint8)
    writer = PageWriter(memory, "lease", 3, total, parts)
    for block in ids:
        writer.add([block], np.full((1, parts), block * 7, dtype=np.uint64))
    return memory


@given(st.lists(st.integers(0, 2**32 - 1), max_size=9), st.integers(0, 5), st.integers(0, 3))
def test_a_page_says_what_was_written(ids: list[int], more: int, parts: int) -> None:
    page = parse(written(ids, len(ids) + more, parts), "lease", 3)
    assert page is not None
    assert (page.total, page.ids) == (len(ids) + more, tuple(ids))
    assert page.sums.tolist() == [[block * 7] * parts for block in ids]


@given(st.integers(0, page_bytes(3, 1) * 8 - 1))
def test_a_page_with_any_bit_changed_is_not_believed(bit: int) -> None:
    memory = written([5, 6], 3, 1)
    memory[bit // 8] ^= 1 << bit % 8
    assert parse(memory, "lease", 3) is None


def test_a_page_of_another_lease_or_fence_or_half_of_one_is_not_believed() -> None:
    memory = written([5, 6], 2, 1)
    assert parse(memory, "other", 3) is None
    assert parse(memory, "lease", 4) is None
    assert parse(memory[:-8], "lease", 3) is None
    assert parse(memory[:8], "lease", 3) is None


def test_more_blocks_than_the_lease_has_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks exceed the lease's 2"):
        written([1, 2, 3], 2, 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=40))
def test_extents_never_overlap_and_all_room_comes_back(steps: list[tuple[bool, int]]) -> None:
    memory = PageMemory(4096)
    held: list[Extent] = []
    for take, size in steps:
        if take:
            extent = memory.take(size)
            if extent is not None:
                assert extent.size == size
                assert all(
                    extent.offset + size <= other.offset or other.offset + other.size <= extent.offset
                    for other in held
                )
                held.append(extent)
        elif held:
            memory.give(held.pop(size % len(held)))
    for extent in held:
        memory.give(extent)
    assert memory.take(4096) == Extent(0, 4096)
