"""Pieces over a socket: all arrive with their sums, and what breaks off is an error."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from kvasir import native
from kvasir.native import _twin_sockets

BOTH = pytest.mark.parametrize("core", [native, _twin_sockets], ids=["native", "twin"])
Bytes = npt.NDArray[np.uint8]
PATIENCE_S = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def cut(memory: Bytes, size: int) -> tuple[array[int], array[int]]:
    start = int(memory.ctypes.data)
    at = array("Q", range(start, start + memory.nbytes, size))
    return at, array("Q", [min(size, start + memory.nbytes - each) for each in at])


@BOTH
@pytest.mark.parametrize("size", [1 << 20, 3000, 64])
def test_all_pieces_arrive_with_the_sums_of_checksum_pieces(
    core: ModuleType, ends: tuple[socket.socket, socket.socket], size: int
) -> None:
    near, far = ends
    sent = np.random.default_rng(1).integers(0, 256, 1_200_000, dtype=np.uint8)
    found = np.zeros_like(sent)
    sending = threading.Thread(target=core.send_pieces, args=(near.fileno(), *cut(sent, size)))
    sending.start()
    at, lengths = cut(found, 8000)
    sums = core.receive_pieces(far.fileno(), at, lengths, 150, 1)
    sending.join()
    assert np.array_equal(found, sent)
    # Row 0 has the first piece of the one region, and so on.
    assert sums == native.checksum_pieces(at, lengths, 1)


@BOTH
def test_the_rest_of_a_piece_wakes_who_waits_with_a_part_of_it(core: ModuleType) -> None:
    found = np.zeros(8192, dtype=np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.sendall(bytes(4096))
        receiving = threading.Thread(
            target=core.receive_pieces, args=(far.fileno(), *cut(found, 8192), 1, 0), daemon=True
        )
        receiving.start()
        until_asleep(receiving)
        near.sendall(b"1" * 4096)
        receiving.join(PATIENCE_S)
        assert not receiving.is_alive()
    assert found.tobytes() == bytes(4096) + b"1" * 4096


def until_asleep(thread: threading.Thread) -> None:
    """Return when a thread waits in the kernel for more than Python's lock."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    deadline, seen = time.monotonic() + PATIENCE_S, 0
    while seen < 100:
        assert time.monotonic() < deadline, "the thread does not wait"
        seen = seen + 1 if ") S " in stat.read_text() else 0


@BOTH
def test_without_parts_there_are_no_sums(core: ModuleType, ends: tuple[socket.socket, socket.socket]) -> None:
    sent = np.arange(10, dtype=np.uint8)
    found = np.zeros_like(sent)
    core.send_pieces(ends[0].fileno(), *cut(sent, 3))
    assert not core.receive_pieces(ends[1].fileno(), *cut(found, 7), 2, 0)
    assert np.array_equal(found, sent)


@BOTH
def test_a_connection_that_ends_too_early_is_an_error(
    core: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    memory = np.zeros(8, dtype=np.uint8)
    core.send_pieces(ends[0].fileno(), *cut(memory[:4], 4))
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        core.receive_pieces(ends[1].fileno(), *cut(memory, 8), 1, 0)


@BOTH
def test_too_little_within_the_time_limit_of_the_socket_is_an_error(
    core: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    memory = np.zeros(8, dtype=np.uint8)
    core.send_pieces(ends[0].fileno(), *cut(memory[:4], 4))
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, b"\0" * 8 + (1000).to_bytes(8, "little"))
    with pytest.raises((TimeoutError, BlockingIOError)):
        core.receive_pieces(ends[1].fileno(), *cut(memory, 8), 1, 0)


@BOTH
def test_what_is_no_socket_is_an_error(core: ModuleType) -> None:
    memory = np.zeros(8, dtype=np.uint8)
    with open(os.devnull, "rb") as closed:
        number = closed.fileno()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        core.send_pieces(number, *cut(memory, 8))


@BOTH
def test_pieces_that_make_no_sense_are_refused(core: ModuleType) -> None:
    with pytest.raises(ValueError, match="no address"):
        core.send_pieces(0, array("Q", [0]), array("Q", [4]))
    with pytest.raises(ValueError, match="rows"):
        core.receive_pieces(0, array("Q", [64]), array("Q", [4]), 2, 1)
