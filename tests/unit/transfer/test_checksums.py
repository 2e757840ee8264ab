"""Checksums of KV blocks: independent of the location, separate for each part, and changed by any flipped
bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion
from kvasir_workers.transfer.common import checksums
from kvasir_workers.transfer.common.checksums import HostSums, Sums, first_difference, require_parts

BLOCKS = 9
SIZES = (48, 96, 48)

Kv = list[npt.NDArray[np.uint8]]


def made(seed: int = 1) -> Kv:
    """Layers of BLOCKS blocks, of different sizes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8) for size in SIZES]


def host(kv: Kv) -> HostSums:
    return HostSums([KvRegion(int(layer.ctypes.data), layer.shape[1], BLOCKS) for layer in kv])


def sums(kv: Kv, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED) -> Sums:
    side = host(kv)
    found = side.begin(blocks, parts, part).result()
    side.close()
    return found


@given(
    st.integers(0, BLOCKS - 1),
    st.integers(0, len(SIZES) - 1),
    st.integers(0, min(SIZES) * 8 - 1),
    st.sampled_from([1, 2, 4]),
)
def test_one_flipped_bit_changes_the_sum_of_its_block_and_part_alone(
    block: int, layer: int, bit: int, parts: int
) -> None:
    kv = made()
    before = sums(kv, range(BLOCKS), parts)
    kv[layer][block, bit // 8] ^= 1 << bit % 8
    changed = np.argwhere(sums(kv, range(BLOCKS), parts) != before)
    assert changed.tolist() == [[block, bit // 8 * parts // SIZES[layer]]]


@pytest.mark.parametrize("of", [2, 4])
def test_a_part_by_itself_has_the_sum_that_it_has_within_its_block(of: int) -> None:
    kv = made()
    whole = sums(kv, [5, 2, 7], of)
    for index in range(of):
        assert (sums(kv, [5, 2, 7], 1, BlockPart(index, of))[:, 0] == whole[:, index]).all()
    if of == 4:
        assert (sums(kv, [5, 2, 7], 2, BlockPart(1, 2)) == whole[:, 2:]).all()


def test_much_is_summed_beside_the_caller_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = made()
    at_once = sums(kv, range(BLOCKS), 2)
    monkeypatch.setattr(checksums, "INLINE_BYTES", 0)
    assert (sums(kv, range(BLOCKS), 2) == at_once).all()


@pytest.mark.parametrize(
    ("parts", "part"), [(1, UNSHARDED), (2, UNSHARDED), (2, BlockPart(1, 2)), (4, BlockPart(0, 1))]
)
def test_torch_finds_the_same_sums(parts: int, part: BlockPart, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from kvasir_workers.transfer.common import cuda_sums

    monkeypatch.setattr(cuda_sums, "SLICE_BYTES", 100)  # two blocks at a time, or one
    kv = made()
    lanes = cuda_sums.LaneSums([torch.from_numpy(layer).view(torch.int32) for layer in kv])
    found = lanes.sums([8, 0, 3], parts, part).numpy().view(np.uint64)
    assert (found == sums(kv, [8, 0, 3], parts, part)).all()


def test_without_parts_there_are_no_sums() -> None:
    assert sums(made(), [1, 2, 3], 0).shape == (3, 0)
    assert sums(made(), [], 2).shape == (0, 2)


def test_the_first_difference_is_named_with_both_sums() -> None:
    mine, theirs = np.array([[1, 2], [3, 4]], np.uint64), np.array([[1, 2], [3, 5]], np.uint64)
    assert first_difference(mine, theirs) == (1, 4, 5)
    assert first_difference(mine, mine) is None


def test_blocks_that_are_no_whole_lanes_are_refused() -> None:
    require_parts([KvRegion(1, 4096, 1)], 2)
    with pytest.raises(TransferError, match=r"set transfer\.checksum to false"):
        require_parts([KvRegion(1, 4096, 1), KvRegion(1, 12, 1)], 2)
