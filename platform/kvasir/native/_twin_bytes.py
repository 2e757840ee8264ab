"""The Python twin of the native copies and checksums; see `_native.pyi` for the contract."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHECKSUM_SEED = 0x243F6A8885A308D3
CHECKSUM_FACTOR = 0xD1342543DE82EF95
CHECKSUM_LANES = 1 << 20
CHECKSUM_TILE = 1024

_M64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Words = npt.NDArray[np.uint64]


def copy_pieces(sources: Buffer, targets: Buffer, lengths: Buffer) -> None:
    """See `_native.pyi`."""
    origins, goals = _words(sources, "sources"), _words(targets, "targets")
    sizes = _words(lengths, "lengths")
    if not len(origins) == len(goals) == len(sizes):
        raise ValueError("sources, targets and lengths must be of one length")
    _require_addresses(origins, sizes)
    _require_addresses(goals, sizes)
    for origin, goal, size in zip(origins.tolist(), goals.tolist(), sizes.tolist(), strict=True):
        if size:
            ctypes.memmove(goal, origin, size)


def checksum_pieces(addresses: Buffer, lengths: Buffer, group: int) -> array[int]:
    """See `_native.pyi`."""
    at, sizes = _words(addresses, "addresses"), _words(lengths, "lengths")
    if len(at) != len(sizes):
        raise ValueError("addresses and lengths must be of one length")
    if group < 1 or len(at) % group:
        raise ValueError("group must be at least 1 and divide the pieces")
    if (sizes % 4).any():
        raise ValueError("lengths must be multiples of 4 bytes")
    _require_addresses(at, sizes)
    weights = _weights(min(int(sizes.max(initial=0)) // 4, CHECKSUM_LANES))
    pieces = [_weigh(*each, weights) for each in zip(at.tolist(), sizes.tolist(), strict=True)]
    sums = array("Q")
    for first in range(0, len(pieces), group):
        total = CHECKSUM_SEED
        for piece in pieces[first : first + group]:
            total = (total * CHECKSUM_FACTOR + piece + 1) & _M64
        sums.append(total)
    return sums


def checksum_weights(count: int) -> array[int]:
    """See `_native.pyi`."""
    return array("Q", np.resize(_weights(min(count, CHECKSUM_LANES)), count).tobytes())


def _words(buffer: Buffer, what: str) -> Words:
    view = memoryview(buffer)
    fits = view.ndim == 1 and view.contiguous and (view.itemsize == 8 or view.format == "B")
    if not fits or view.nbytes % 8:
        raise ValueError(f"{what} must be one contiguous buffer of 8-byte items")
    return np.frombuffer(view, dtype="<u8")


def _weights(count: int) -> Words:
    tiles = -(-count // CHECKSUM_TILE)
    of_tile = np.ones(max(1, tiles), dtype=np.uint64)
    of_tile[1:] = _outputs(CHECKSUM_TILE + 1, tiles - 1)
    found: Words = (of_tile[:, None] * _outputs(1, CHECKSUM_TILE)[None, :]).reshape(-1)[:count]
    return found


def _outputs(first: int, count: int) -> Words:
    x = np.arange(first, first + max(0, count), dtype=np.uint64) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _weigh(address: int, size: int, weights: Words) -> int:
    if not size:
        return 0
    lanes = np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), dtype="<u4")
    return sum(
        int((lanes[at : at + CHECKSUM_LANES] * weights[: len(lanes) - at]).sum(dtype=np.uint64))
        for at in range(0, len(lanes), CHECKSUM_LANES)
    )


def _require_addresses(addresses: Words, sizes: Words) -> None:
    if ((addresses == 0) & (sizes != 0)).any():
        raise ValueError("a piece has no address")
