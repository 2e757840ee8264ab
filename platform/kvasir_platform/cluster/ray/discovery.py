"""Discovery over Ray: each worker keeps a record in the key-value store of Ray's head.

The router reads it without being a Ray driver. A driver would add a core worker, its threads and 100 MB to
the router, and would end the process after a minute without the head.

Unreadable state is assumed to be unchanged: records do not expire while the head is away or this process does
not poll, and a store that has lost all records at once has to be read empty again before it is believed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs

from kvasir.core.errors import ProtocolError
from kvasir.core.membership import (
    NAMESPACE,
    STALE_S,
    Liveness,
    MemberRecord,
    MembershipSnapshot,
    member_prefix,
)
from kvasir.ports.clock import Clock

log = logging.getLogger(__name__)

POLL_S = 0.5
REQUEST_TIMEOUT_S = 2.0
FORGET_S = 120.0


@dataclass(slots=True)
class DiscoveredWorker:
    """Seconds in which the store was readable: the time by which records expire. It advances by at most
    `step_s` between two readings, and not at all while the store cannot be read."""

    step_s: float = 2 * POLL_S
    patience_s: float = STALE_S
    _seen_s: float = 0.0
    _at: float | None = None
    _empty_since: float | None = None

    def look(self, now: float) -> float:
        """Record a successful reading. Return the readable time so far, in seconds."""
        if self._at is not None:
            self._seen_s += min(now - self._at, self.step_s)
        self._at = now
        self._empty_since = None
        return self._seen_s

    def lose(self) -> None:
        """Record a failed reading."""
        self._at = None

    def doubts(self, now: float) -> bool:
        """Whether an empty store, after there were members, is still to be confirmed."""
        if self._empty_since is None:
            self._empty_since = now
        return now - self._empty_since < self.patience_s


class RayDiscovery:
    """The Discovery port over the key-value store of a Ray head (port: kvasir.ports.discovery)."""

    def __init__(self, address: str, deployment: str, clock: Clock) -> None:
        self._gcs = GcsClient(address=address)
        self._prefix = member_prefix(deployment).encode()
        self._clock = clock
        self._stale_since: float | None = None
        self._closed = asyncio.Event()

    async def watch(self) -> AsyncIterator[MembershipSnapshot]:
        liveness = Liveness()
        sight = DiscoveredWorker()
        last: MembershipSnapshot | None = None
        while not self._closed.is_set():
            try:
                records = await self._read()
                if not records and last is not None and last.endpoints and sight.doubts(self._clock.now()):
                    raise ProtocolError("every record has gone at once")
            except Exception as error:  # noqa: BLE001 - Ray raises several private types; fail static
                if self._stale_since is None:
                    log.warning("cannot read members from Ray, keeping the last ones: %s", error)
                    self._stale_since = self._clock.now()
                sight.lose()
            else:
                if self._stale_since is not None:
                    log.warning("members can be read from Ray again, after %.0f s", self.stale_s())
                    self._stale_since = None
                now = sight.look(self._clock.now())
                endpoints = liveness.live(records, now)
                if last is None or endpoints != last.endpoints:
                    last = MembershipSnapshot(revision=last.revision + 1 if last else 1, endpoints=endpoints)
                    yield last
                await self._forget(liveness.long_stale(now, FORGET_S))
            await self._clock.sleep(POLL_S)

    def stale_s(self) -> float:
        """See Discovery."""
        return 0.0 if self._stale_since is None else self._clock.now() - self._stale_since

    async def close(self) -> None:
        self._closed.set()

    async def _read(self) -> dict[str, MemberRecord]:
        keys = await asyncio.to_thread(self._gcs.internal_kv_keys, self._prefix, NAMESPACE, REQUEST_TIMEOUT_S)
        if not keys:
            return {}
        found = await asyncio.to_thread(self._gcs.internal_kv_multi_get, keys, NAMESPACE, REQUEST_TIMEOUT_S)
        records: dict[str, MemberRecord] = {}
        for key, raw in found.items():
            try:
                record = MemberRecord.decode(raw)
            except ProtocolError as error:
                log.warning("ignoring member record %r: %s", key, error)
                continue
            records[record.worker_id] = record
        return records

    async def _forget(self, worker_ids: list[str]) -> None:
        for worker_id in worker_ids:
            key = self._prefix + worker_id.encode()
            try:
                await asyncio.to_thread(self._gcs.internal_kv_del, key, False, NAMESPACE, REQUEST_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - as above; the next reading tries again
                log.warning("cannot remove the expired record of %s: %s", worker_id, error)
                return
