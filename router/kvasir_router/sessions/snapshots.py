"""Fetches workers' snapshots beside their sessions: bulk data that must not delay tokens or outlive a
session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

from kvasir.core.errors import ProtocolError
from kvasir.core.kv import KvSnapshotPart
from kvasir.ports.clock import Clock
from kvasir.ports.session import ConnectionLost
from kvasir_router.index import FetchSnapshot
from kvasir_router.requests.events import SnapshotEnded, SnapshotEvent, SnapshotPart

MAX_AT_ONCE = 4


class Source(Protocol):
    """The interface that fetches need of a worker's session."""

    def snapshot(self, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]: ...


class Snapshots:
    """Fetches at most one snapshot per worker, and MAX_AT_ONCE in all; others wait for their turn.

    `feed` takes the parts, and the loop runs between them. `spawn` runs a task whose failure is the router's.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        feed: Callable[[SnapshotEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._clock = clock
        self._feed = feed
        self._spawn = spawn
        self._running: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    def fetch(self, wanted: FetchSnapshot, source: Source) -> None:
        """Begin a fetch; cancels an earlier one for the worker."""
        self.cancel(wanted.worker_id)
        name = f"snapshot-{wanted.worker_id}"
        self._running[wanted.worker_id] = self._spawn(self._run(wanted, source), name)

    def cancel(self, worker_id: str) -> None:
        """Cancel a fetch, without an event."""
        task = self._running.pop(worker_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, wanted: FetchSnapshot, source: Source) -> None:
        async with self._turns:
            error, final = await self._parts(wanted, source)
        # The code below may start the next attempt in this one's place.
        self._running.pop(wanted.worker_id, None)
        self._feed(SnapshotEnded(wanted.worker_id, wanted.attempt, error, final))

    async def _parts(self, wanted: FetchSnapshot, source: Source) -> tuple[str | None, bool]:
        """Feed all parts. Return the error, if any, and whether it is final."""
        try:
            async with aclosing(source.snapshot(wanted.epoch)) as parts:
                async for part in parts:
                    self._feed(SnapshotPart(wanted.worker_id, wanted.attempt, part))
                    await self._clock.sleep(0)
        except ConnectionLost as error:
            return str(error), False
        except ProtocolError as error:
            return error.message, True
        return None, False
