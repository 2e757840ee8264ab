"""A connector whose memory flips one bit between the arrival of KV and its checksum.

It flips one bit each time the file named in FLIP_FILE is created, and deletes the file as proof.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from kvasir.ports.transfer import UNSHARDED, BlockPart
from kvasir_workers.connector.connector import KvasirConnector
from kvasir_workers.transfer.common.checksums import HostSums, PendingSums
from load_tests.scenarios.scorecard.workers.flipping_worker import FLIP_FILE

__all__ = ["KvasirConnector"]

# The last byte of a little-endian float32: its bit changes the value by many orders of magnitude.
BYTE, BIT = 3, 0x40


_sum = HostSums.begin


def _flip_and_sum(
    sums: HostSums, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED
) -> PendingSums:
    """Checksums of the contents after the flip."""
    flag = Path(os.environ[FLIP_FILE])
    if blocks and flag.exists():
        at = int(sums._bases[0]) + blocks[0] * int(sums._strides[0]) + BYTE
        ctypes.c_uint8.from_address(at).value ^= BIT
        flag.unlink()
    return _sum(sums, blocks, parts, part)


setattr(HostSums, "begin", _flip_and_sum)  # noqa: B010 - an assignment would be one to a method
