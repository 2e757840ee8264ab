"""Membership out of Ray's key-value store, with the store in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvasir.core.membership import Endpoint, MemberRecord, member_key
from kvasir_platform.control import ray_discovery
from kvasir_platform.control.ray_discovery import FORGET_S, RayDiscovery

PATIENCE_S = 10.0


class Store:
    """The part of Ray's GcsClient that discovery uses."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.deletions = 0
        self.deletion_fails = False

    def put(self, worker_id: str, beat: int) -> None:
        record = MemberRecord(worker_id, f"{worker_id}:1", "decode", pid=1, beat=beat)
        self.records[member_key("d", worker_id).encode()] = record.encode()

    def internal_kv_keys(self, prefix: bytes, *_: Any) -> list[bytes]:
        return [key for key in self.records if key.startswith(prefix)]

    def internal_kv_multi_get(self, keys: list[bytes], *_: Any) -> dict[bytes, bytes]:
        return {key: self.records[key] for key in keys}

    def internal_kv_del(self, key: bytes, *_: Any) -> None:
        self.deletions += 1
        if self.deletion_fails:
            raise OSError("the head has gone")
        del self.records[key]


class Leaps:
    """A clock on which each poll takes so long that a silent worker is forgotten at the next."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += FORGET_S
        self._store.put("alive", int(self._now))
        await asyncio.sleep(0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(ray_discovery, "GcsClient", lambda **_: made)
    made.put("alive", 0)
    made.put("silent", 0)
    return made


async def test_a_worker_that_stays_silent_is_dropped_and_its_record_removed(store: Store) -> None:
    discovery = RayDiscovery("head:1", "d", Leaps(store))
    async with asyncio.timeout(PATIENCE_S):
        watch = discovery.watch()
        assert len((await anext(watch)).endpoints) == 2
        assert (await anext(watch)).endpoints == {Endpoint("alive", "alive:1", "decode")}
        waiting = asyncio.ensure_future(anext(watch))
        while store.deletions == 0:
            await asyncio.sleep(0)
        await discovery.close()
        await asyncio.gather(waiting, return_exceptions=True)
    assert list(store.records) == [member_key("d", "alive").encode()]


async def test_a_record_that_cannot_be_removed_does_not_end_the_watch(store: Store) -> None:
    store.deletion_fails = True
    discovery = RayDiscovery("head:1", "d", Leaps(store))
    async with asyncio.timeout(PATIENCE_S):
        watch = discovery.watch()
        await anext(watch)
        await anext(watch)
        waiting = asyncio.ensure_future(anext(watch))
        while store.deletions < 3:
            await asyncio.sleep(0)
        assert not waiting.done()
        await discovery.close()
        await asyncio.gather(waiting, return_exceptions=True)
