"""A connector that flips one bit of KV on its way: between the sender's checksum and the receiver's.

It flips one bit each time the file named in FLIP_FILE is created, and deletes the file as proof. NIXL writes
into the receiver's memory, which is summed afterwards, so the bit flips in the receiver. The NCCL adapter
sums what it receives as it receives it, so the bit flips in the sender, whose memory is then as before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Buffer

from kvasir.native import send_pieces
from kvasir.ports.transfer import UNSHARDED, BlockPart
from kvasir_workers.connector.connector import KvasirConnector
from kvasir_workers.transfer.common.checksums import HostSums, PendingSums
from kvasir_workers.transfer.nccl import sockets
from load_tests.scenarios.scorecard.workers.flipping_worker import FLIP_AT, FLIP_FILE, RECEIVER

__all__ = ["KvasirConnector"]

# The last byte of a little-endian float32: its bit changes the value by many orders of magnitude.
BYTE, BIT = 3, 0x40


_sum = HostSums.begin


def _flip(at: int) -> None:
    """Flip a bit of the number at an address."""
    ctypes.c_uint8.from_address(at + BYTE).value ^= BIT


def _flip_and_sum(
    sums: HostSums, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED
) -> PendingSums:
    """Checksums of the contents after the flip."""
    flag = Path(os.environ[FLIP_FILE])
    if blocks and flag.exists():
        _flip(int(sums._bases[0]) + blocks[0] * int(sums._strides[0]))
        flag.unlink()
    return _sum(sums, blocks, parts, part)


def _flip_and_send(fd: int, addresses: Buffer, lengths: Buffer) -> None:
    """Send the contents after the flip, and undo it."""
    flag = Path(os.environ[FLIP_FILE])
    if not flag.exists():
        send_pieces(fd, addresses, lengths)
        return
    first = memoryview(addresses).cast("B").cast("Q")[0]
    _flip(first)
    try:
        send_pieces(fd, addresses, lengths)
    finally:
        _flip(first)
    flag.unlink()


if os.environ[FLIP_AT] == RECEIVER:
    setattr(HostSums, "begin", _flip_and_sum)  # noqa: B010 - an assignment would be one to a method
else:
    setattr(sockets, "send_pieces", _flip_and_send)  # noqa: B010 - the module exports no such name
