"""The Python twin of the native moves over a socket; `_native.pyi` has the contract."""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvasir.native._twin_process import Pieces

if TYPE_CHECKING:
    from typing_extensions import Buffer


def send_pieces(fd: int, addresses: Buffer, lengths: Buffer) -> None:
    """See `_native.pyi`."""
    pieces = Pieces.checked(addresses, addresses, lengths, max(1, memoryview(lengths).nbytes // 8), 0)
    for view in _views(pieces):
        _all(view, lambda left: os.writev(fd, left))


def receive_pieces(fd: int, addresses: Buffer, lengths: Buffer, rows: int, parts: int) -> array[int]:
    """See `_native.pyi`."""
    pieces = Pieces.checked(addresses, addresses, lengths, rows, parts)
    for view in _views(pieces):
        _all(view, lambda left: os.readv(fd, left))
    return pieces.sums()


def _views(pieces: Pieces) -> list[memoryview]:
    return [
        memoryview((ctypes.c_uint8 * size).from_address(goal)).cast("B")
        for goal, size in zip(pieces.goals.tolist(), pieces.sizes.tolist(), strict=True)
        if size
    ]


def _all(view: memoryview, move: Callable[[Sequence[memoryview]], int]) -> None:
    while view:
        moved = move([view])
        if not moved:
            raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        view = view[moved:]
