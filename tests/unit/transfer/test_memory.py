"""Blocks as chunks: nothing is omitted or moved twice, and every copy method gives the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion  # noqa: E402 - after the skip
from kvasir_workers.transfer.common.cuda_memory import RowsBatch  # noqa: E402
from kvasir_workers.transfer.common.memory import (  # noqa: E402
    CHUNK_BYTES,
    DIRECT_BYTES,
    CopyBatch,
    HostKvMemory,
    HostPieces,
    cut,
    row_ends,
)

BLOCKS = 12
PIECES = (64, 128, 96)
"""Bytes of one block in each region."""


def kv(seed: int) -> list[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8) for size in PIECES]


def host_batch(regions: Sequence[npt.NDArray[np.uint8]], blocks: Sequence[int], part: BlockPart) -> CopyBatch:
    memory = HostKvMemory([KvRegion(int(r.ctypes.data), r.shape[1], r.shape[0]) for r in regions])
    return memory.batch(blocks, part)


def rows_batch(regions: Sequence[npt.NDArray[np.uint8]], blocks: Sequence[int], part: BlockPart) -> CopyBatch:
    return RowsBatch([torch.from_numpy(region) for region in regions], blocks, part, lambda copy: copy())


blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True)
parts = st.sampled_from([UNSHARDED, BlockPart(0, 2), BlockPart(1, 2), BlockPart(3, 4)])
makers = pytest.mark.parametrize("make", [host_batch, rows_batch], ids=["host", "rows"])


@makers
@given(blocks=blocks, part=parts, data=st.data())
def test_what_is_gathered_and_scattered_are_the_blocks_parts_and_nothing_else(
    make: type, blocks: list[int], part: BlockPart, data: st.DataObject
) -> None:
    source, target = kv(1), kv(2)
    expected = [region.copy() for region in target]
    for mine, theirs in zip(expected, source, strict=True):
        width = mine.shape[1] // part.of
        columns = slice(part.index * width, (part.index + 1) * width)
        mine[blocks, columns] = theirs[blocks, columns]
    sending, receiving = make(source, blocks, part), make(target, blocks, part)
    inner = st.lists(st.integers(1, sending.pieces), max_size=4, unique=True)
    bounds = sorted({0, sending.pieces, *data.draw(inner)})
    for stretch in pairwise(bounds):
        staging = torch.empty(sending.size(stretch), dtype=torch.uint8)
        sending.gather(stretch, staging)
        direct = sending.direct(stretch)
        if direct is not None:
            assert contents(direct) == staging.numpy().tobytes()
        receiving.scatter(staging, stretch)
    for found, wanted in zip(target, expected, strict=True):
        assert (found == wanted).all()


def contents(pieces: HostPieces) -> bytes:
    each = zip(pieces.at.tolist(), pieces.lengths.tolist(), strict=True)
    return b"".join(ctypes.string_at(at, length) for at, length in each)


def test_a_batch_in_host_memory_is_one_chunk_in_its_place() -> None:
    target = kv(2)
    batch = host_batch(target, [4, 9], UNSHARDED)
    ((start, stop),) = batch.chunks()
    assert (start, stop) == (0, batch.pieces)
    direct = batch.direct((start, stop))
    assert direct is not None
    assert direct.rows == 2
    assert direct.at.tolist() == [int(region[block].ctypes.data) for region in target for block in (4, 9)]


@given(
    st.lists(
        st.tuples(st.sampled_from([4096, 65536, 1 << 20, 5 << 20]), st.booleans()), min_size=1, max_size=60
    )
)
def test_chunks_are_the_whole_row_once_in_order_and_bounded(pieces: list[tuple[int, bool]]) -> None:
    lengths = np.array([length for length, _ in pieces], dtype=np.uint64)
    bounds = sorted({0, len(pieces), *(i for i, (_, broken) in enumerate(pieces) if broken)})
    ends = row_ends(lengths)
    chunks = cut(ends, bounds)
    assert [piece for start, stop in chunks for piece in range(start, stop)] == list(range(len(pieces)))
    for start, stop in chunks:
        assert stop == start + 1 or ends[stop] - ends[start] <= CHUNK_BYTES


def test_a_long_stretch_makes_chunks_of_its_own() -> None:
    piece = 64 << 10
    long = DIRECT_BYTES // piece
    bounds = [0, 1, 2, 2 + long, 3 + long]
    assert cut(row_ends(np.full(bounds[-1], piece, dtype=np.uint64)), bounds) == [
        (0, 2),
        (2, 2 + long),
        (2 + long, 3 + long),
    ]
