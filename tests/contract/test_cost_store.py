"""Contract of the stores of costs: in memory, in a SQLite file, and in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from tests.kit.lab.redis_server import RedisServer

from kvasir.config.spec.redis import CostRedisSpec
from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.ports.stores.costs import DAY_S, HOUR_S, CostBatch, CostGroup, CostStore, WorkerHour, WorkSums
from kvasir_platform.gateway.costs.memory_store import MemoryCosts
from kvasir_platform.gateway.costs.redis_store import RedisCosts
from kvasir_platform.gateway.costs.sqlite_store import SqliteCosts

HOUR = 1_900_000_800 // DAY_S * DAY_S
SHOP = CostGroup(HOUR, "decode", "shop", "0a1b2c3d4e5f", "kvasir-tiny", "default")
SUMS = WorkSums(2.0, 100.0, 40.0, 20.0, 0.125, 0.5, 0.0625, 0.03, 0.1)
WORKER = WorkerHour(HOUR, "decode", "decode-1", "router-a", 0.0, 60.0, 12.5, 2.0, 5.98)

Make = Callable[[], CostStore]


@contextmanager
def limited_pages(store: SqliteCosts) -> Iterator[None]:
    """Let the file not grow, as on a full disk."""
    file = store._file
    (pages,) = file.execute("PRAGMA page_count").fetchone()
    (before,) = file.execute("PRAGMA max_page_count").fetchone()
    file.execute(f"PRAGMA max_page_count = {pages}")
    yield
    file.execute(f"PRAGMA max_page_count = {before}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest_asyncio.fixture(params=["memory", "sqlite", "redis"])
async def make(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> AsyncIterator[Make]:
    """Makes one more router's store of the same kind and place."""
    made: list[CostStore] = []
    memory = MemoryCosts()
    name = f"t{abs(hash(request.node.name)) % 10**9}"

    def factory() -> CostStore:
        store: CostStore
        if request.param == "memory":
            store = memory
        elif request.param == "sqlite":
            store = SqliteCosts(tmp_path / "costs.sqlite")
        else:
            spec = CostRedisSpec(url=server.url, namespace=name, timeout_s=20.0)
            store = RedisCosts(spec, retention_days=92)
        made.append(store)
        return store

    yield factory
    for store in made:
        await store.close()


async def test_a_batch_is_read_as_it_was_added(make: Make) -> None:
    store = make()
    await store.add(CostBatch("router-a", 1, {SHOP: SUMS}, [WORKER]))
    found = await store.read(HOUR, HOUR + HOUR_S)
    assert found.work == {SHOP: SUMS}
    assert list(found.workers) == [WORKER]


async def test_a_batch_that_is_sent_again_counts_once(make: Make) -> None:
    store = make()
    first = CostBatch("router-a", 1, {SHOP: SUMS}, [WORKER])
    second = CostBatch("router-a", 2, {SHOP: SUMS}, [])
    for batch in (first, first, second, second, first):
        await store.add(batch)
    assert (await store.read(HOUR, HOUR + HOUR_S)).work == {SHOP: SUMS.plus(SUMS)}


async def test_sums_of_several_routers_add_up(make: Make) -> None:
    near, far = make(), make()
    await near.add(CostBatch("router-a", 1, {SHOP: SUMS}, [WORKER]))
    await far.add(CostBatch("router-b", 1, {SHOP: SUMS}, [WORKER._replace(router="router-b")]))
    found = await near.read(HOUR, HOUR + HOUR_S)
    assert found.work == {SHOP: SUMS.plus(SUMS)}
    assert {each.router for each in found.workers} == {"router-a", "router-b"}


async def test_a_worker_hour_replaces_the_one_before_it(make: Make) -> None:
    store = make()
    later = WORKER._replace(last_s=120.0, busy_s=40.0)
    await store.add(CostBatch("router-a", 1, {}, [WORKER]))
    await store.add(CostBatch("router-a", 2, {}, [later]))
    assert list((await store.read(HOUR, HOUR + HOUR_S)).workers) == [later]


async def test_hours_outside_of_the_question_are_not_returned(make: Make) -> None:
    store = make()
    groups = {SHOP._replace(hour=HOUR + number * HOUR_S): SUMS for number in range(-30, 30)}
    await store.add(CostBatch("router-a", 1, groups, []))
    found = await store.read(HOUR - 2 * HOUR_S, HOUR + 3 * HOUR_S)
    assert sorted((group.hour - HOUR) // HOUR_S for group in found.work) == [-2, -1, 0, 1, 2]


async def test_what_is_forgotten_is_gone(make: Make) -> None:
    store = make()
    old = HOUR - 2 * DAY_S
    work = {SHOP: SUMS, SHOP._replace(hour=old): SUMS}
    await store.add(CostBatch("router-a", 1, work, [WORKER, WORKER._replace(hour=old)]))
    await store.forget(HOUR - DAY_S)
    found = await store.read(old, HOUR + HOUR_S)
    assert set(found.work) == {SHOP}
    assert list(found.workers) == [WORKER]


async def test_names_are_kept_whatever_they_hold(make: Make) -> None:
    store = make()
    group = SHOP._replace(model="org/model:tag,v1 'x'", key="", tenant="ä|b")
    await store.add(CostBatch("router-a", 1, {group: SUMS}, []))
    assert set((await store.read(HOUR, HOUR + HOUR_S)).work) == {group}


async def test_a_file_keeps_costs_after_a_restart_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "costs.sqlite"
    first = SqliteCosts(path)
    await first.add(CostBatch("router-a", 1, {SHOP: SUMS}, [WORKER]))
    await first.close()
    assert path.stat().st_mode & 0o077 == 0
    again = SqliteCosts(path)
    assert (await again.read(HOUR, HOUR + HOUR_S)).work == {SHOP: SUMS}
    await again.close()


def test_a_file_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    path.write_text("not a database, but a text that is long enough to look like one\n" * 100)
    with pytest.raises(ConfigError, match="name a file that can be written"):
        SqliteCosts(path)


async def test_a_full_disk_is_named_and_the_batch_can_be_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    store = SqliteCosts(path)
    await store.add(CostBatch("router-a", 1, {SHOP: SUMS}, []))
    batch = CostBatch("router-a", 2, {SHOP._replace(key=f"{n:0200d}"): SUMS for n in range(100)}, [])
    with limited_pages(store):
        for _ in range(2):
            with pytest.raises(UpstreamError, match="database or disk is full"):
                await store.add(batch)
    await store.add(batch)
    assert len((await store.read(HOUR, HOUR + HOUR_S)).work) == 101
    await store.close()


async def test_a_server_that_is_gone_is_an_error_and_is_found_again(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        store = RedisCosts(CostRedisSpec(url=server.url, timeout_s=20.0), retention_days=92)
        await store.add(CostBatch("router-a", 1, {SHOP: SUMS}, []))
        server.kill()
        with pytest.raises(UpstreamError, match="does not answer"):
            await store.add(CostBatch("router-a", 2, {SHOP: SUMS}, []))
        server.start()
        await store.add(CostBatch("router-a", 2, {SHOP: SUMS}, []))
        assert (await store.read(HOUR, HOUR + HOUR_S)).work == {SHOP: SUMS}
        await store.close()


async def test_costs_in_redis_expire_with_the_retention(server: RedisServer) -> None:
    store = RedisCosts(CostRedisSpec(url=server.url, namespace="expiry", timeout_s=20.0), retention_days=31)
    await store.add(CostBatch("router-a", 1, {SHOP: SUMS}, [WORKER]))
    for kind in ("work", "workers", "writers"):
        left = server.ask("TTL", f"expiry:cost:{HOUR // DAY_S}:{kind}")
        assert 31 * DAY_S < int(left.lstrip(":")) <= 32 * DAY_S
    await store.close()
