"""Access to KV blocks in GPU memory through a staging buffer on the same GPU: a gather or scatter of rows per
region.

Blocks are never sent or received directly: an aborted communicator may still write to its buffer, and a copy
within the GPU is cheap compared with the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvasir.ports.transfer import BlockPart, KvRegion
from kvasir_workers.transfer.common.cuda_sums import region_rows
from kvasir_workers.transfer.common.memory import CopyBatch, Stretch, cut, row_ends


class CudaMemory:
    """See memory.Memory. Copies run on a separate stream, so that they do not wait for a model step."""

    def __init__(self, regions: Sequence[KvRegion]) -> None:
        self._device = torch.device(regions[0].device)
        self._regions = [region_rows(region) for region in regions]
        self._stream = torch.cuda.Stream(self._device)

    def batch(self, blocks: Sequence[int], part: BlockPart) -> CopyBatch:
        """See memory.Memory."""
        return RowsBatch(self._regions, blocks, part, self._run)

    def staging(self, size: int) -> Any:
        """See memory.Memory."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _run(self, copy: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            copy()
        self._stream.synchronize()


class RowsBatch:
    """Pieces of blocks as rows of byte matrices, one matrix per region. `run` calls its argument, and returns
    when the work is complete on the device."""

    def __init__(
        self,
        regions: Sequence[torch.Tensor],
        blocks: Sequence[int],
        part: BlockPart,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        widths = [region.shape[1] // part.of for region in regions]
        self._parts = [
            region.narrow(1, part.index * width, width) for region, width in zip(regions, widths, strict=True)
        ]
        self._rows = torch.tensor(blocks, dtype=torch.int64, device=regions[0].device)
        self._ends = row_ends(np.repeat(np.array(widths, dtype=np.uint64), len(blocks)))
        self._run = run

    @property
    def pieces(self) -> int:
        """See memory.CopyBatch."""
        return len(self._ends) - 1

    def chunks(self) -> list[Stretch]:
        """See memory.CopyBatch."""
        return cut(self._ends, range(self.pieces + 1))

    def size(self, stretch: Stretch) -> int:
        """See memory.CopyBatch."""
        return int(self._ends[stretch[1]] - self._ends[stretch[0]])

    def direct(self, stretch: Stretch) -> None:
        """See memory.CopyBatch."""

    def gather(self, stretch: Stretch, staging: Any) -> None:
        """See memory.CopyBatch."""
        self._run(lambda: self._copy(stretch, staging, gather=True))

    def scatter(self, staging: Any, stretch: Stretch) -> None:
        """See memory.CopyBatch."""
        self._run(lambda: self._copy(stretch, staging, gather=False))

    def _copy(self, stretch: Stretch, staging: Any, *, gather: bool) -> None:
        done, (start, stop) = 0, stretch
        while start < stop:
            region, first = divmod(start, len(self._rows))
            last = min(len(self._rows), first + stop - start)
            rows, part = self._rows[first:last], self._parts[region]
            staged = staging[done : done + len(rows) * part.shape[1]].view(len(rows), -1)
            if gather:
                staged.copy_(part.index_select(0, rows))
            else:
                part.index_copy_(0, rows, staged)
            done += staged.numel()
            start += len(rows)
