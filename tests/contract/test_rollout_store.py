"""Contract of what routers share of rollouts: in memory, and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.kit.lab.redis_server import RedisServer

from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.core.errors import UpstreamError
from kvasir.ports.traffic.rollouts import RolloutStore, StoredRollout
from kvasir_platform.gateway.traffic.memory_rollouts import MemoryRollouts
from kvasir_platform.gateway.traffic.redis_rollouts import RedisRollouts

NOTHING = StoredRollout(0, 0, b"", {})


@pytest_asyncio.fixture(params=["memory", "redis"])
async def routers(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Callable[[], RolloutStore]]:
    """Makes the store of one router; all of them share their rollouts."""
    if request.param == "memory":
        store = MemoryRollouts()
        yield lambda: store
        return
    made: list[RedisRollouts] = []
    with RedisServer(tmp_path) as server:

        def make() -> RolloutStore:
            made.append(RedisRollouts(LimitsRedisSpec(url=server.url, timeout_s=5.0)))
            return made[-1]

        yield make
        for each in made:
            await each.close()


async def test_one_of_several_changes_from_a_version_is_stored(routers: Callable[[], RolloutStore]) -> None:
    one, other = routers(), routers()
    assert await one.add("chat", 0, {}) == NOTHING
    stored = await asyncio.gather(one.replace("chat", 0, 1, b"first"), other.replace("chat", 0, 1, b"second"))
    assert sorted(stored) == [False, True]
    found = await other.add("chat", 1, {})
    assert found == StoredRollout(1, 1, b"first" if stored[0] else b"second", {})
    assert not await one.replace("chat", 0, 1, b"late")
    assert await one.add("other", 0, {}) == NOTHING


async def test_counts_are_sums_over_routers_and_end_with_their_run(
    routers: Callable[[], RolloutStore],
) -> None:
    one, other = routers(), routers()
    assert await one.replace("chat", 0, 1, b"s")
    await one.add("chat", 1, {"itl_worse": 2, "itl_better": 1})
    assert (await other.add("chat", 1, {"itl_worse": 5})).counts == {"itl_worse": 7, "itl_better": 1}
    # A step of the same run keeps them; counts of another run are ignored, and a new run begins at zero.
    assert await one.replace("chat", 1, 1, b"t")
    assert (await one.add("chat", 9, {"itl_worse": 5})).counts == {"itl_worse": 7, "itl_better": 1}
    assert await one.replace("chat", 2, 2, b"u")
    assert await one.add("chat", 1, {"itl_worse": 1}) == StoredRollout(3, 2, b"u", {})


async def test_a_server_that_is_gone_is_an_error_and_one_that_is_back_is_used_again(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        store = RedisRollouts(LimitsRedisSpec(url=server.url, timeout_s=5.0))
        assert await store.add("chat", 0, {}) == NOTHING
        server.kill()
        with pytest.raises(UpstreamError) as caught:
            await store.add("chat", 0, {})
        assert caught.value.code == "rollouts_unavailable"
        server.start()
        assert await store.add("chat", 0, {}) == NOTHING
        await store.close()
