"""A worker's own record of the KV blocks that its engine holds, and what routers are told of it.

The engine says what it stores and evicts while it computes; routers want one batch for each step, numbered,
and a snapshot when they have missed one. Between the two stands a shadow of the cache, which names blocks
as routers do. Engines write to it, sessions read from it.
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

_NAME_BYTES = 8
_RECORD_BYTES = 16


class Holdings:
    """`kvasir.ports.engine.KvSource` over a shadow of `ranks` data-parallel ranks.

    `root_of(salt, adapter)` is where chains begin. A change is handed over `delay_s` after it was written
    at the latest, and at once when about `max_log_bytes` wait. Parts of snapshots have about `part_blocks`
    blocks. All methods are called on one event loop.
    """

    def __init__(
        self,
        ranks: int,
        root_of: Callable[[str, str], int],
        *,
        delay_s: float = 0.02,
        max_log_bytes: int = 64 << 10,
        part_blocks: int = 4096,
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
        # What waits in the log is in the parts too; whoever applies it again changes nothing by that.
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
                    raise CapacityError("the record began anew while it was read", code=INCOMPLETE)

    # -- what the engine says ----------------------------------------------------------------------

    def begin(self, epoch: int, *, incomplete: str | None = None) -> None:
        """Number batches from 1 in `epoch`, the worker's own, before anything is written. `incomplete` says
        why the record cannot be believed until `restore`."""
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
        """Blocks that the engine holds from here on; see kvasir.native.Shadow."""
        stored = self._shadow.store(rank, medium, parent, keys, tokens, block_size, salt, adapter)
        self._note(_RECORD_BYTES + _NAME_BYTES * stored)

    def remove(self, rank: int, keys: Buffer, medium: Medium = Medium.DEVICE) -> None:
        """Blocks of which the engine holds one copy less."""
        removed = self._shadow.remove(rank, medium, keys)
        self._note(_RECORD_BYTES + _NAME_BYTES * removed)

    def clear(self, rank: int, medium: Medium = Medium.DEVICE) -> None:
        """The engine holds nothing on one medium of this rank."""
        self._shadow.clear(rank, medium)
        self._note(_RECORD_BYTES)

    def ingest(self, rank: int, payload: bytes) -> None:
        """One message of vLLM's KV event stream, in which our tiers' changes may be; see
        kvasir.native.Shadow. Raises ValueError, with nothing recorded, when it is malformed."""
        self._shadow.ingest(rank, payload)
        # Tokens take more room in a message than names do in a log.
        self._note(len(payload))

    def lose(self, reason: str) -> None:
        """Some of what the engine said is lost: a new epoch begins, in which nothing is told until
        `restore`. Whoever follows learns it at once, by a batch of the new epoch without changes."""
        if self._incomplete is not None:
            return
        self._incomplete = reason
        self._shadow.take_log()
        self._epoch, self._sequence = self._epoch + 1, 0
        self._hand_over(b"")

    def restore(self) -> None:
        """The record says all that is held again."""
        self._shadow.take_log()
        self._incomplete = None

    # -- views -------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch in which batches are numbered."""
        return self._epoch

    @property
    def unnamed(self) -> int:
        """Blocks that could not be recorded, since what comes before them was unknown."""
        return self._shadow.unnamed

    def held(self, rank: int, medium: Medium = Medium.DEVICE) -> int:
        """Different blocks recorded on one medium of one rank."""
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
