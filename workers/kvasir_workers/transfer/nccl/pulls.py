"""One pull as its two threads see it: the step loop, which may give it up, and the one that fills its blocks.

Blocks are written in two ways. Copies out of staging are made under the pull's lock and never after the pull
has ended. A chunk that the process group writes by itself can only be stopped by ending the group, so a pull
that expects one does not end before.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import PullFailed, PullSucceeded
from kvasir_workers.transfer.common.checksums import Sums, describe_difference
from kvasir_workers.transfer.common.memory import CopyBatch, Stretch
from kvasir_workers.transfer.common.pulls import PullSpec, PullTimer
from kvasir_workers.transfer.nccl.local import Local


class CancelResult(Enum):
    """ENDED: nothing is written any more. COPYING: try again. EXPECTING: the group must be ended first."""

    ENDED = "ended"
    COPYING = "copying"
    EXPECTING = "expecting"


class NcclPull:
    """One pull. `block_bytes` of each target block over all regions come from the other side. How it ended
    goes to `ended`, once."""

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
        """Whether every block has come."""
        return self._blocks[1] == len(self.wanted.targets) and not self._outstanding

    def open(self, first: int, theirs: Sums) -> None:
        """Blocks from number `first` on come next, one for each row of their sums. Raises TransferError."""
        end = first + len(theirs)
        if first != self._blocks[1] or self._outstanding or not first < end <= len(self.wanted.targets):
            raise TransferError("it sends blocks that were not asked for, or not in their order")
        self._blocks, self._theirs = (first, end), theirs
        self._batch = self._local.memory.batch(self.wanted.targets[first:end], self.wanted.target)
        self._stored = self._expected = 0

    def expect(self, stretch: Stretch) -> tuple[Any | None, int]:
        """A chunk is about to come: the KV to receive it into, or else None, and its bytes. Raises
        TransferError."""
        batch = self._batch
        if batch is None or stretch[0] != self._expected or not stretch[0] < stretch[1] <= batch.pieces:
            raise TransferError("it sends a chunk that does not fit the pull")
        self._expected = stretch[1]
        with self._lock:
            direct = None if self.over else batch.direct(stretch)
            self._direct += direct is not None
        return direct, batch.size(stretch)

    def store(self, stretch: Stretch, staged: Any | None) -> None:
        """A chunk is here, in staging or else in the KV itself."""
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
            mine = self._local.sums.begin(blocks, theirs.shape[1], self.wanted.target)
            self._summing.append((first, mine, theirs))

    def succeed(self) -> bool:
        """All has come. False where it is not what was sent, or the pull is over already."""
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
        """End badly, unless it is over; waits for a copy that is under way. Not while the group may write."""
        with self._lock:
            if self.over:
                return
            if self._late:
                reason, detail = "timeout", self._timer.detail
            self._end(self.wanted.failed(reason, detail))

    def give_up(self) -> CancelResult:
        """End as timed out, where that can be done at once."""
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
