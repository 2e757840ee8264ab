"""Maintains a worker's membership record in Ray's key-value store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from kvasir.core.membership import HEARTBEAT_S, NAMESPACE, MemberRecord, leave_key, member_key
from kvasir.ports.clock import Clock

log = logging.getLogger(__name__)


class Announcer:
    """Writes the record at start and every BEAT_S with a higher beat, and removes it when stopped. It
    continues while Ray's head is unavailable. `on_leave` is called once with the reason if the record asks
    the worker to leave; None disables the check."""

    def __init__(
        self,
        deployment: str,
        record: MemberRecord,
        clock: Clock,
        on_leave: Callable[[str], None] | None = None,
    ) -> None:
        self._key = member_key(deployment, record.worker_id).encode()
        self._leave_key = leave_key(deployment, record.worker_id).encode()
        self._on_leave = on_leave
        self._record = record
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        heard = True
        while True:
            try:
                await asyncio.to_thread(self._put, self._record.encode())
                await self._look()
            except Exception as error:  # noqa: BLE001 - Ray raises several private types; the next beat tries again
                if heard:
                    log.warning("cannot write this worker's membership record to Ray; retrying: %s", error)
                heard = False
            else:
                heard = True
            self._record = replace(self._record, beat=self._record.beat + 1)
            await self._clock.sleep(HEARTBEAT_S)

    async def _look(self) -> None:
        if self._on_leave is None:
            return
        asked = await asyncio.to_thread(_internal_kv_get, self._leave_key, namespace=NAMESPACE)
        if asked is not None:
            on_leave, self._on_leave = self._on_leave, None
            on_leave(asked.decode(errors="replace"))

    def _put(self, value: bytes) -> None:
        _internal_kv_put(self._key, value, overwrite=True, namespace=NAMESPACE)

    async def withdraw(self) -> None:
        """Stop and remove the record, which becomes stale by itself if the head is unavailable.
        Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await asyncio.to_thread(_internal_kv_del, self._key, namespace=NAMESPACE)
                await asyncio.to_thread(_internal_kv_del, self._leave_key, namespace=NAMESPACE)
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("cannot remove this worker's membership record, which will become stale: %s", error)
