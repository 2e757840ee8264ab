"""The tasks that a router runs beside its callers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class RouterTasks:
    """Tasks of which each is needed: an error of one is the router's. It is in `failure` once `failed` is
    set."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended: %s", task.get_name(), error, exc_info=error)
            self.failure = self.failure or error
            self.failed.set()


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return when one of `waits` has ended, after cancelling the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
