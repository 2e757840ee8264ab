"""The state of one pull, shared by two threads: the step loop, which may cancel it, and the thread that fills
its blocks.

Blocks are written in two ways. Copies from staging are made under the pull's lock, and never after the pull
has ended. A chunk that the process group writes directly can be stopped only by ending the group, so a pull
that expects one does not end before.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import PullFailed, PullSucceeded
from kvasir_workers.transfer.common.checksums import LANE_BYTES, Sums, describe_difference, known
from kvasir_workers.transfer.common.memory import CopyBatch, HostPieces, Stretch
from kvasir_workers.transfer.common.pulls import PullSpec, PullTimer
from kvasir_workers.transfer.nccl.local import Local


class CancelResult(Enum):
    """ENDED: no further writes. COPYING: try again. EXPECTING: end the group first."""

    ENDED = "ended"
    COPYING = "copying"
    EXPECTING = "expecting"


class NcclPull:
    """One pull of `block_bytes` per target block over all regions. Its result is appended to `ended`,
    once."""

    def __init__(
        self, wanted: PullSpec, block_bytes: int, local: Local, ended: deque[PullSucceeded | PullFailed]
    ) -> None:
        self.wanted = wanted
        self.over = False
        self._block_bytes = block_bytes
        self._local = local
        self._ended = ended
        self._timer = PullTimer(wanted.timeout_s, local.now)
        self._lock = threading.Lock()
        self._late = False
        self._direct = 0
        self._arriving: HostPieces | None = None
        self._batch: CopyBatch | None = None
        self._blocks: Stretch = (0, 0)
        self._theirs: Sums | None = None
        self._stored = self._expected = 0
        self._summing: list[tuple[int, Future[Sums], Sums]] = []

    @property
    def late(self) -> bool:
        """Whether nothing was received for the pull's timeout."""
        return self._timer.late

    @property
    def whole(self) -> bool:
        """Whether every block was received."""
        return self._blocks[1] == len(self.wanted.targets) and not self._outstanding

    def open(self, first: int, theirs: Sums) -> None:
        """Begin a batch of blocks from number `first` on, one for each row of their sums. Raise
        TransferError."""
        end = first + len(theirs)
        if first != self._blocks[1] or self._outstanding or not first < end <= len(self.wanted.targets):
            raise TransferError("the sender sends blocks that were not requested, or are out of order")
        self._blocks, self._theirs = (first, end), theirs
        self._batch = self._local.memory.batch(self.wanted.targets[first:end], self.wanted.target)
        self._stored = self._expected = 0

    def expect(self, stretch: Stretch) -> tuple[Any | None, int]:
        """Expect a chunk: return the KV to receive it into, or None for staging, and its size in bytes. Raise
        TransferError."""
        batch = self._batch
        if batch is None or stretch[0] != self._expected or not stretch[0] < stretch[1] <= batch.pieces:
            raise TransferError("the sender sends a chunk that does not fit the pull")
        self._expected = stretch[1]
        with self._lock:
            direct = None if self.over else batch.direct(stretch)
            self._direct += direct is not None
        self._arriving = direct
        parts = 0 if self._theirs is None else self._theirs.shape[1]
        # Otherwise the batch is summed when all of it has come.
        if direct is not None and stretch == (0, batch.pieces) and parts:
            direct.parts = 0 if (direct.lengths % np.uint64(LANE_BYTES * parts)).any() else parts
        return direct, batch.size(stretch)

    def store(self, stretch: Stretch, staged: Any | None) -> None:
        """Store a received chunk, which is in staging, or (None) in the KV itself."""
        batch, theirs = self._batch, self._theirs
        if batch is None or theirs is None:
            return
        with self._lock:
            self._direct -= staged is None
            self._stored = stretch[1]
            self._timer.restart()
            if self.over:
                return
            if staged is not None:
                batch.scatter(staged, stretch)
        if self._stored == batch.pieces:
            first, end = self._blocks
            blocks = self.wanted.targets[first:end]
            summed = None if self._arriving is None else self._arriving.sums
            begin = self._local.sums.begin
            mine = begin(blocks, theirs.shape[1], self.wanted.target) if summed is None else known(summed)
            self._summing.append((first, mine, theirs))

    def succeed(self) -> bool:
        """End a pull that was received. Return False if a checksum differs, or the pull has already ended."""
        for first, mine, theirs in self._summing:
            differs = describe_difference(mine.result(), theirs, partial(self._name, first))
            if differs:
                self.fail("checksum", differs)
        with self._lock:
            if self.over:
                return False
            self._end(self.wanted.succeeded(self._block_bytes, self._timer.seconds))
        return True

    def fail(self, reason: str, detail: str) -> None:
        """End with a failure, unless the pull has ended; waits for a running copy. Must not be called while
        the group may write."""
        with self._lock:
            if self.over:
                return
            if self._late:
                reason, detail = "timeout", self._timer.detail
            self._end(self.wanted.failed(reason, detail))

    def give_up(self) -> CancelResult:
        """End with a timeout, if that is possible at once."""
        if not self._lock.acquire(blocking=False):
            return CancelResult.COPYING
        try:
            if self._direct:
                self._late = True
                return CancelResult.EXPECTING
            if not self.over:
                self._end(self.wanted.failed("timeout", self._timer.detail))
            return CancelResult.ENDED
        finally:
            self._lock.release()

    def _name(self, first: int, row: int) -> str:
        number = first + row
        return f"block {self.wanted.targets[number]}, number {self.wanted.first + number} of the offer"

    @property
    def _outstanding(self) -> bool:
        return self._batch is not None and self._stored < self._batch.pieces

    def _end(self, event: PullSucceeded | PullFailed) -> None:
        self.over = True
        self._ended.append(event)
