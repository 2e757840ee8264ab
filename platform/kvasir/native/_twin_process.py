"""The Python twin of the native reads of another process's memory; every read happens in the call.

`_native.pyi` has the contract.
"""

from __future__ import annotations

import ctypes
import errno
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvasir.native._twin_bytes import checksum_pieces

if TYPE_CHECKING:
    from typing_extensions import Buffer

Words = npt.NDArray[np.uint64]


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Blocks in pieces that are grouped by region, `rows` in each, to be summed in `parts`."""

    origins: Words
    goals: Words
    sizes: Words
    rows: int
    parts: int

    @classmethod
    def checked(cls, sources: Buffer, targets: Buffer, lengths: Buffer, rows: int, parts: int) -> Pieces:
        """Raise ValueError for what makes no sense."""
        origins, goals, sizes = (
            np.frombuffer(memoryview(each), dtype="<u8") for each in (sources, targets, lengths)
        )
        if not len(origins) == len(goals) == len(sizes):
            raise ValueError("sources, targets and lengths must be of one length")
        if rows < 1 or len(sizes) % rows:
            raise ValueError("rows must be at least 1 and divide the pieces")
        if ((origins == 0) & (sizes != 0)).any() or ((goals == 0) & (sizes != 0)).any():
            raise ValueError("a piece has no address")
        if parts and (sizes % (4 * parts)).any():
            raise ValueError("lengths must be multiples of 4 bytes for each part")
        return cls(origins, goals, sizes, rows, parts)

    def sums(self) -> array[int]:
        """Return the sum of each part of each row."""
        if not self.parts:
            return array("Q")
        regions = len(self.sizes) // self.rows
        pieces = (self.sizes // np.uint64(self.parts)).reshape(regions, self.rows, 1)
        at = self.goals.reshape(regions, self.rows, 1) + np.arange(self.parts, dtype=np.uint64) * pieces
        by_row = np.ascontiguousarray(at.transpose(1, 2, 0)).reshape(-1)
        spans = np.ascontiguousarray(np.repeat(pieces, self.parts, axis=2).transpose(1, 2, 0)).reshape(-1)
        return checksum_pieces(by_row.data, spans.data, max(1, regions))


class ProcessRead:
    """See `_native.pyi`."""

    def __init__(self, error: int, sums: array[int]) -> None:
        self._error = error
        self._sums = sums

    def state(self) -> int:
        """See `_native.pyi`."""
        return self._error

    def cancel(self) -> None:
        """See `_native.pyi`."""

    def sums(self) -> array[int]:
        """See `_native.pyi`."""
        if self._error:
            raise ValueError("the read has not succeeded")
        return self._sums


class ProcessReader:
    """See `_native.pyi`."""

    def __init__(self, threads: int) -> None:
        self._closed = False

    def begin(  # noqa: PLR0917 - as the native function takes them
        self,
        process: int,
        sources: Buffer,
        targets: Buffer,
        lengths: Buffer,
        rows: int,
        parts: int,
        at_once: int,
    ) -> ProcessRead:
        """See `_native.pyi`."""
        pieces = Pieces.checked(sources, targets, lengths, rows, parts)
        if self._closed and int(pieces.sizes.sum()) > at_once:
            return ProcessRead(errno.ECANCELED, array("Q"))
        each = zip(pieces.origins.tolist(), pieces.goals.tolist(), pieces.sizes.tolist(), strict=True)
        for origin, goal, size in each:
            if error := _copy(process, origin, goal, size):
                return ProcessRead(error, array("Q"))
        return ProcessRead(0, pieces.sums())

    def close(self) -> None:
        """See `_native.pyi`."""
        self._closed = True


def _copy(process: int, source: int, target: int, size: int) -> int:
    """Return an error's number, or 0."""
    if not size:
        return 0
    local, remote = _Vector(target, size), _Vector(source, size)
    read = _libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    got = read(ctypes.c_int(process), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if got == size:
        return 0
    return ctypes.get_errno() if got < 0 else errno.EFAULT
