"""Membership from Ray's key-value store, with the store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvasir.core.membership import STALE_S, Endpoint, MemberRecord, MembershipSnapshot, member_key
from kvasir_platform.cluster.ray import discovery as ray_discovery
from kvasir_platform.cluster.ray.discovery import DiscoveredWorker, RayDiscovery

PATIENCE_S = 10.0


class Store:
    """The part of Ray's GcsClient that discovery uses."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}
        self.deletions = 0
        self.deletion_fails = False
        self.away = False

    def put(self, worker_id: str, beat: int) -> None:
        record = MemberRecord(worker_id, f"{worker_id}:1", "decode", pid=1, beat=beat)
        self.records[member_key("d", worker_id).encode()] = record.encode()

    def internal_kv_keys(self, prefix: bytes, *_: Any) -> list[bytes]:
        if self.away:
            raise OSError("the head is away")
        return [key for key in self.records if key.startswith(prefix)]

    def internal_kv_multi_get(self, keys: list[bytes], *_: Any) -> dict[bytes, bytes]:
        return {key: self.records[key] for key in keys}

    def internal_kv_del(self, key: bytes, *_: Any) -> None:
        self.deletions += 1
        if self.deletion_fails:
            raise OSError("the head has gone")
        del self.records[key]


class Polls:
    """A clock on which only `sleep` takes time; with each, the worker `alive` beats. `happens` is called
    with the time before each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._now = 0.0
        self.beats = True
        self.happens: Callable[[float], None] = lambda _: None

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.happens(self._now)
        self._now += seconds
        if self.beats:
            self._store.put("alive", int(self._now * 1000))
        await asyncio.sleep(0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(ray_discovery, "GcsClient", lambda **_: made)
    made.put("alive", 0)
    made.put("silent", 0)
    return made


async def test_a_worker_that_stays_silent_is_dropped_and_its_record_removed(store: Store) -> None:
    discovery = RayDiscovery("head:1", "d", Polls(store))
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
    discovery = RayDiscovery("head:1", "d", Polls(store))
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


async def _until(
    clock: Polls, end_s: float, watch: AsyncIterator[MembershipSnapshot]
) -> list[MembershipSnapshot]:
    """What the watch yields up to a time."""
    seen: list[MembershipSnapshot] = []
    while True:
        waiting = asyncio.ensure_future(anext(watch))
        while not waiting.done() and clock.now() < end_s:
            await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return seen
        seen.append(waiting.result())


async def test_a_head_that_is_away_for_long_takes_no_member_with_it_when_it_comes_back(store: Store) -> None:
    clock = Polls(store)
    del store.records[member_key("d", "silent").encode()]

    def outage(now: float) -> None:
        store.away = 10.0 <= now < 100.0
        # Workers could not beat either: the first reading afterwards finds what the last one did.
        clock.beats = not 9.5 <= now < 101.0

    clock.happens = outage
    async with asyncio.timeout(PATIENCE_S):
        seen = await _until(clock, 120.0, RayDiscovery("head:1", "d", clock).watch())
    assert [members.endpoints for members in seen] == [{Endpoint("alive", "alive:1", "decode")}]


async def test_it_tells_for_how_long_it_has_been_blind(store: Store) -> None:
    clock, told = Polls(store), dict[float, float]()
    discovery = RayDiscovery("head:1", "d", clock)

    def outage(now: float) -> None:
        store.away = 10.0 <= now < 40.0
        told[now] = discovery.stale_s()

    clock.happens = outage
    async with asyncio.timeout(PATIENCE_S):
        await _until(clock, 50.0, discovery.watch())
    assert told[9.5] == 0.0
    assert told[30.0] == pytest.approx(20.0, abs=1.0)
    assert told[45.0] == 0.0


@pytest.mark.parametrize(("later_s", "found"), [(STALE_S - 1, [2, 1]), (STALE_S + 1, [2, 1, 0])])
async def test_a_store_that_lost_everything_at_once_is_believed_only_after_some_time(
    store: Store, later_s: float, found: list[int]
) -> None:
    clock = Polls(store)

    def loss(now: float) -> None:
        clock.beats = now < 10.0
        if now >= 10.0:
            store.records.clear()

    clock.happens = loss
    async with asyncio.timeout(PATIENCE_S):
        watch = RayDiscovery("head:1", "d", clock).watch()
        seen = await _until(clock, 10.0 + later_s, watch)
        assert [len(members.endpoints) for members in seen] == found


def test_time_in_which_nobody_looked_does_not_count() -> None:
    sight = DiscoveredWorker(step_s=1.0)
    assert sight.look(0.0) == 0.0
    assert sight.look(0.5) == 0.5
    assert sight.look(50.0) == 1.5  # the loop was stalled
    sight.lose()
    assert sight.look(90.0) == 1.5  # the head was away
    assert sight.look(90.5) == 2.0
