"""Reads from another process: every byte in its place, the sums of what was read, errors by their number."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from array import array
from itertools import pairwise
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir import native
from kvasir.native import _twin_bytes, _twin_process

BOTH = pytest.mark.parametrize("core", [native, _twin_process], ids=["native", "twin"])
PATIENCE_S = 20.0
RUNNING = -1
ALL = 1 << 40
"""More than any read here: it happens in the call."""

Bytes = npt.NDArray[np.uint8]


def random_bytes(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def ended(read: native.ProcessRead) -> int:
    """The state of a read once it is over."""
    deadline = time.monotonic() + PATIENCE_S
    while read.state() == RUNNING:
        assert time.monotonic() < deadline, "the read does not end"
    return read.state()


def pieces(memory: Bytes, sizes: list[int], rows: int, order: list[int]) -> array[int]:
    """Addresses of pieces in `memory`, each region behind the one before; `order` permutes rows."""
    at, found = int(memory.ctypes.data), array("Q")
    for size in sizes:
        found.extend(at + row * size for row in order)
        at += rows * size
    return found


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], int, int, list[int], list[int]]:
    """Sizes of a piece in each region, rows, parts, and the order of rows on both sides."""
    parts = draw(st.sampled_from([0, 1, 2]))
    rows = draw(st.integers(1, 5))
    lanes = st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 1025, 4096, 5000, 70_000]))
    sizes = [8 * draw(lanes) for _ in range(draw(st.integers(1, 3)))]
    forward = list(range(rows))
    return sizes, rows, parts, draw(st.permutations(forward)), draw(st.permutations(forward))


@pytest.mark.parametrize("at_once", [0, ALL], ids=["threads", "at once"])
@BOTH
@given(shapes())
def test_every_byte_arrives_with_the_sums_of_checksum_pieces(
    core: ModuleType, at_once: int, shape: tuple[list[int], int, int, list[int], list[int]]
) -> None:
    sizes, rows, parts, theirs, mine = shape
    total = max(1, rows * sum(sizes))
    source, target = random_bytes(1, total), np.zeros(total, dtype=np.uint8)
    sources, targets = pieces(source, sizes, rows, theirs), pieces(target, sizes, rows, mine)
    lengths = array("Q", [size for size in sizes for _ in range(rows)])
    reader = core.ProcessReader(2)
    read = reader.begin(os.getpid(), sources, targets, lengths, rows, parts, at_once)
    assert ended(read) == 0
    reader.close()
    expected = np.zeros(total, dtype=np.uint8)
    _twin_bytes.copy_pieces(
        sources,
        array("Q", [a - int(target.ctypes.data) + int(expected.ctypes.data) for a in targets]),
        lengths,
    )
    assert np.array_equal(target, expected)
    assert list(read.sums()) == expected_sums(sources, lengths, rows, parts)


def expected_sums(sources: array[int], lengths: array[int], rows: int, parts: int) -> list[int]:
    regions = len(lengths) // rows
    at, spans = array("Q"), array("Q")
    for row in range(rows):
        for part in range(parts):
            for region in range(regions):
                size = lengths[region * rows + row] // parts
                at.append(sources[region * rows + row] + part * size)
                spans.append(size)
    return list(_twin_bytes.checksum_pieces(at, spans, regions)) if parts else []


def one(core: ModuleType, process: int, source: int, at_once: int = 0) -> int:
    """The end of a read of 1 MiB at that address."""
    target = np.zeros(1 << 20, dtype=np.uint8)
    reader = core.ProcessReader(1)
    size = array("Q", [target.nbytes])
    read = reader.begin(
        process, array("Q", [source]), array("Q", [int(target.ctypes.data)]), size, 1, 1, at_once
    )
    code = ended(read)
    with pytest.raises(ValueError, match="not succeeded"):
        read.sums()
    reader.close()
    return code


@BOTH
@pytest.mark.parametrize("at_once", [0, ALL], ids=["threads", "at once"])
def test_memory_that_is_not_there_is_an_error(core: ModuleType, at_once: int) -> None:
    assert one(core, os.getpid(), 1 << 12, at_once) == errno.EFAULT


@BOTH
def test_memory_that_ends_within_a_read_is_an_error(core: ModuleType) -> None:
    page = random_bytes(1, 1 << 16)
    stack_end = _mapping_end(int(page.ctypes.data))
    assert one(core, os.getpid(), stack_end - 4096) == errno.EFAULT


def _mapping_end(address: int) -> int:
    """The end of the last mapping before a gap of at least 1 MiB, from the one of `address` on."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        spans = [tuple(int(edge, 16) for edge in line.split()[0].split("-")) for line in maps]
    spans = [span for span in spans if span[1] > address]
    for (_, end), (start, _) in pairwise(spans):
        if start - end >= 1 << 20:
            return end
    raise AssertionError("no gap")


@BOTH
def test_a_process_that_was_killed_cannot_be_read(core: ModuleType) -> None:
    killed = subprocess.Popen(["sleep", "60"])
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert one(core, killed.pid, 1 << 22) == errno.ESRCH


@BOTH
def test_a_reader_that_was_closed_reads_no_more(core: ModuleType) -> None:
    source, target = random_bytes(1, 1 << 20), np.zeros(1 << 20, dtype=np.uint8)
    reader = core.ProcessReader(2)
    reader.close()
    reader.close()
    read = reader.begin(
        os.getpid(),
        array("Q", [int(source.ctypes.data)]),
        array("Q", [int(target.ctypes.data)]),
        array("Q", [target.nbytes]),
        1,
        1,
        0,
    )
    assert ended(read) == errno.ECANCELED
    assert not target.any()


def test_a_cancelled_read_ends_and_writes_nothing_more() -> None:
    source, target = random_bytes(1, 64 << 20), np.zeros(64 << 20, dtype=np.uint8)
    reader = native.ProcessReader(2)
    at = [n << 20 for n in range(64)]
    read = reader.begin(
        os.getpid(),
        array("Q", [int(source.ctypes.data) + each for each in at]),
        array("Q", [int(target.ctypes.data) + each for each in at]),
        array("Q", [1 << 20] * 64),
        64,
        1,
        0,
    )
    read.cancel()
    if ended(read):
        assert ended(read) == errno.ECANCELED
        target[:] = 0
        reader.close()
        assert not target.any()
    reader.close()


@BOTH
@pytest.mark.parametrize(
    ("sources", "lengths", "rows", "parts", "what"),
    [
        ([64, 64], [4], 1, 1, "one length"),
        ([64, 64], [4, 4], 0, 1, "rows"),
        ([64, 64, 64], [4, 4, 4], 2, 1, "rows"),
        ([64], [12], 1, 2, "multiples of 4"),
        ([0], [4], 1, 1, "no address"),
    ],
)
def test_reads_that_make_no_sense_are_refused(  # noqa: PLR0917 - pytest passes the parameters
    core: ModuleType, sources: list[int], lengths: list[int], rows: int, parts: int, what: str
) -> None:
    reader = core.ProcessReader(1)
    addresses = array("Q", sources)
    with pytest.raises(ValueError, match=what):
        reader.begin(os.getpid(), addresses, addresses, array("Q", lengths), rows, parts, 0)
