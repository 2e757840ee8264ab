"""Checksums of KV blocks in GPU memory, with torch. Equal to those of `kvasir.native.checksum_pieces`.

Each layer's memory is viewed as a matrix of 4-byte lanes, one row per block. The requested rows are gathered,
widened to 64 bits, weighted and summed; torch integer arithmetic wraps modulo 2**64, as the checksum does. It
works in slices, so that scratch memory stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from kvasir.native import CHECKSUM_FACTOR, CHECKSUM_SEED, checksum_weights
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion
from kvasir_workers.transfer.common.checksums import LANE_BYTES, PendingSums, Sums

SLICE_BYTES = 8 << 20


class LaneSums:
    """Checksums over layers given as matrices of 32-bit integers, one row per block; on any torch device."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = layers
        self._weights: dict[int, torch.Tensor] = {}

    def sums(self, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED) -> torch.Tensor:
        """Return the sums as 64-bit integers, one row per block and one column per piece."""
        device = self._layers[0].device
        total = torch.full((len(blocks), parts), _signed(CHECKSUM_SEED), dtype=torch.int64, device=device)
        if not parts or not blocks:
            return total
        wanted = torch.tensor(blocks, dtype=torch.int64, device=device)
        for layer in self._layers:
            lanes = layer.shape[1] // part.of
            mine = layer[:, part.index * lanes : (part.index + 1) * lanes]
            slices = wanted.split(max(1, SLICE_BYTES // (lanes * LANE_BYTES)))
            sums = torch.cat([self._weigh(mine[rows], lanes // parts) for rows in slices])
            total = total * _signed(CHECKSUM_FACTOR) + sums + 1
        return total

    def _weigh(self, rows: torch.Tensor, lanes: int) -> torch.Tensor:
        if lanes not in self._weights:
            found = torch.from_numpy(np.frombuffer(checksum_weights(lanes), dtype=np.int64).copy())
            self._weights[lanes] = found.to(rows.device)
        pieces = rows.reshape(len(rows), -1, lanes).to(torch.int64) & 0xFFFFFFFF
        return (pieces * self._weights[lanes]).sum(dim=2)


class CudaSums:
    """BlockSums over the memory of one GPU. `after_compute`: see `checksums.block_sums`."""

    def __init__(self, regions: Sequence[KvRegion], *, after_compute: bool) -> None:
        self._device = torch.device(regions[0].device)
        self._lanes = LaneSums([region_rows(region).view(torch.int32) for region in regions])
        self._stream = torch.cuda.Stream(self._device)
        self._after_compute = after_compute
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="kv-sums")

    def begin(self, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED) -> PendingSums:
        """See BlockSums."""
        if self._after_compute:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            sums = self._lanes.sums(blocks, parts, part)
            host = torch.empty(sums.shape, dtype=torch.int64, pin_memory=sums.numel() > 0)
            host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return self._waiting.submit(_await, event, host)

    def close(self) -> None:
        """See BlockSums."""
        self._waiting.shutdown(wait=True)


def _await(event: torch.cuda.Event, host: torch.Tensor) -> Sums:
    event.synchronize()
    found: Sums = host.numpy().view(np.uint64)
    return found


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def region_rows(region: KvRegion) -> torch.Tensor:
    """Return a region's memory, not copied, as a matrix of bytes with one row per block."""
    return torch.as_tensor(_Rows(region), device=region.device)


class _Rows:
    """Device memory by address, in the form that torch accepts."""

    def __init__(self, region: KvRegion) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (region.blocks, region.block_bytes),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }
