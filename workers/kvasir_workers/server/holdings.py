"""A worker's own record of the KV blocks that its engine holds, and its announcement to routers.

The engine reports what it stores and evicts while it computes; routers need one numbered batch for each step,
and a snapshot when they have missed one. A shadow of the cache stands between the two, and translates blocks
to block hashes. Engines write to it, sessions read from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from kvasir.core.errors import CapacityError
from kvasir.core.kv import KvBatch, KvSnapshotPart, Medium
from kvasir.native import Shadow
from kvasir.ports.engine import KvSink

if TYPE_CHECKING:
    from typing_extensions import Buffer

INCOMPLETE = "kv_incomplete"
PART_BLOCKS = 2048
"""Blocks in a part of a snapshot. A router takes in a part at once, and decides nothing meanwhile."""

_NAME_BYTES = 8
_RECORD_BYTES = 16


class Holdings:
    """`kvasir.ports.engine.KvSource` over a shadow of `ranks` data-parallel ranks.

    `root_of(salt, adapter)` returns the root of a chain of hashes. A change is published at the latest
    `delay_s` after it was written, and at once when about `max_log_bytes` are pending. Parts of snapshots
    have about `part_blocks` blocks. All methods are called on one event loop.
    """

    def __init__(
        self,
        ranks: int,
        root_of: Callable[[str, str], int],
        *,
        delay_s: float = 0.02,
        max_log_bytes: int = 64 << 10,
        part_blocks: int = PART_BLOCKS,
    ) -> None:
        self._ranks = ranks
        self._shadow = Shadow(ranks, root_of)
        self._delay_s = delay_s
        self._max_log_bytes = max_log_bytes
        self._part_blocks = part_blocks
        self._epoch = 0
        self._sequence = 0
        self._sink: KvSink | None = None
        self._incomplete: str | None = None
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- the port ----------------------------------------------------------------------------------

    @property
    def incomplete(self) -> str | None:
        """See KvSource."""
        return self._incomplete

    def subscribe(self, sink: KvSink | None) -> None:
        """See KvSource."""
        self._sink = sink

    def flush(self) -> None:
        """See KvSource."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting_bytes = 0
        log = self._shadow.take_log()
        if log and self._incomplete is None:
            self._hand_over(log)

    async def snapshot(self) -> AsyncGenerator[KvSnapshotPart, None]:
        """See KvSource."""
        self._refuse_while_incomplete()
        # Pending changes are in the parts too; applying them again has no effect.
        epoch, sequence = self._epoch, self._sequence
        for rank in range(self._ranks):
            cursor = 0
            while cursor >= 0:
                log, cursor = self._shadow.export(rank, cursor, self._part_blocks)
                last = cursor < 0 and rank == self._ranks - 1
                if log or last:
                    yield KvSnapshotPart(epoch, sequence, log, last)
                if last:
                    return
                await asyncio.sleep(0)
                self._refuse_while_incomplete()
                if self._epoch != epoch:
                    raise CapacityError("the record was reset while it was read", code=INCOMPLETE)

    # -- recording ---------------------------------------------------------------------------------

    def begin(self, epoch: int, *, incomplete: str | None = None) -> None:
        """Number batches from 1 in `epoch`, the worker's own, before anything is written. `incomplete` is why
        the record is invalid until `restore`."""
        self._epoch, self._sequence = epoch, 0
        self._incomplete = incomplete

    def store(
        self,
        rank: int,
        parent: int | None,
        keys: Buffer,
        tokens: Buffer,
        block_size: int,
        *,
        salt: str = "",
        adapter: str = "",
        medium: Medium = Medium.DEVICE,
    ) -> None:
        """Record blocks that the engine stored; see kvasir.native.Shadow."""
        stored = self._shadow.store(rank, medium, parent, keys, tokens, block_size, salt, adapter)
        self._note(_RECORD_BYTES + _NAME_BYTES * stored)

    def remove(self, rank: int, keys: Buffer, medium: Medium = Medium.DEVICE) -> None:
        """Record that the engine holds one copy less of each block."""
        removed = self._shadow.remove(rank, medium, keys)
        self._note(_RECORD_BYTES + _NAME_BYTES * removed)

    def clear(self, rank: int, medium: Medium = Medium.DEVICE) -> None:
        """Record that the engine holds nothing on one medium of this rank."""
        self._shadow.clear(rank, medium)
        self._note(_RECORD_BYTES)

    def ingest(self, rank: int, payload: bytes) -> None:
        """Record one message of vLLM's KV event stream, which may include changes of our tiers; see
        kvasir.native.Shadow. Raise ValueError, with nothing recorded, if it is malformed."""
        self._shadow.ingest(rank, payload)
        # Tokens take more space in a message than block hashes do in a log.
        self._note(len(payload))

    def lose(self, reason: str) -> None:
        """Mark the record as incomplete because events were lost: a new epoch begins, in which nothing is
        published until `restore`. Subscribers are notified at once, by a batch of the new epoch without
        changes."""
        if self._incomplete is not None:
            return
        self._incomplete = reason
        self._shadow.take_log()
        self._epoch, self._sequence = self._epoch + 1, 0
        self._hand_over(b"")

    def restore(self) -> None:
        """Mark the record as complete again."""
        self._shadow.take_log()
        self._incomplete = None

    # -- views -------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch in which batches are numbered."""
        return self._epoch

    @property
    def unnamed(self) -> int:
        """Number of blocks that could not be recorded, since their parent was unknown."""
        return self._shadow.unnamed

    def held(self, rank: int, medium: Medium = Medium.DEVICE) -> int:
        """Return the number of distinct blocks recorded on one medium of one rank."""
        return self._shadow.held(rank, medium)

    # -- inside ------------------------------------------------------------------------------------

    def _note(self, log_bytes: int) -> None:
        self._waiting_bytes += log_bytes
        if self._waiting_bytes >= self._max_log_bytes:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self.flush)

    def _hand_over(self, log: bytes) -> None:
        self._sequence += 1
        if self._sink is not None:
            self._sink(KvBatch(self._epoch, self._sequence, log))

    def _refuse_while_incomplete(self) -> None:
        if self._incomplete is not None:
            raise CapacityError(self._incomplete, code=INCOMPLETE)
