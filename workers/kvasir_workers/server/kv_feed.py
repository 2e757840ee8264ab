"""The KV events that sessions send to routers: batches, and a bounded number of snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvasir.core.errors import CapacityError, ProtocolError
from kvasir.core.kv import KvBatch, KvSnapshotPart
from kvasir.ports.engine import KvSource

TOO_MANY_SNAPSHOTS = "too_many_snapshots"
KV_UNREPORTED = "kv_unreported"


class KvFeed:
    """Follows `source` until `close`; None for an engine that keeps no record.

    A batch waits until the end of the event loop's iteration to be sent with a step, then is passed to
    `broadcast` alone.
    """

    def __init__(
        self, source: KvSource | None, broadcast: Callable[[KvBatch], None], *, max_snapshots: int
    ) -> None:
        self._source = source
        self._broadcast = broadcast
        self._max_snapshots = max_snapshots
        self._snapshots = 0
        self._waiting: KvBatch | None = None
        if source is not None:
            source.subscribe(self._take_in)

    def take(self) -> KvBatch | None:
        """Return the waiting batch; the caller sends it."""
        batch, self._waiting = self._waiting, None
        return batch

    async def snapshot(self) -> AsyncGenerator[KvSnapshotPart, None]:
        """Return all that the engine holds; see KvSource. Raise ProtocolError if it keeps no record, and
        CapacityError while the record is incomplete or too many snapshots are read (`too_many_snapshots`)."""
        if self._source is None:
            raise ProtocolError("this worker keeps no record of the blocks that it holds", code=KV_UNREPORTED)
        if self._snapshots >= self._max_snapshots:
            raise CapacityError(
                f"{self._snapshots} snapshots are being read, which is the limit", code=TOO_MANY_SNAPSHOTS
            )
        self._snapshots += 1
        try:
            async with aclosing(self._source.snapshot()) as parts:
                async for part in parts:
                    yield part
        finally:
            self._snapshots -= 1

    def close(self) -> None:
        """Stop. Idempotent."""
        self._waiting = None
        if self._source is not None:
            self._source.subscribe(None)

    def _take_in(self, batch: KvBatch) -> None:
        if self._waiting is None:
            asyncio.get_running_loop().call_soon(self._send_waiting)
        else:
            self._send_waiting()
        self._waiting = batch

    def _send_waiting(self) -> None:
        batch = self.take()
        if batch is not None:
            self._broadcast(batch)
