"""What every Discovery adapter owes. An adapter joins by a `Source` and a line in `SOURCES`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import pytest
import pytest_asyncio

from kvasir.core.errors import ConfigError
from kvasir.core.membership import Endpoint, Members
from kvasir.ports.discovery import Discovery
from kvasir_platform.sim.discovery import FeedDiscovery
from kvasir_router.discovery_static import StaticDiscovery

PATIENCE_S = 20.0


class Source(Protocol):
    """An adapter under test, with two members behind it at first."""

    @property
    def discovery(self) -> Discovery: ...

    async def change(self) -> bool:
        """Replace the members by one other. False: this source cannot change."""
        ...


class StaticSource:
    def __init__(self) -> None:
        self.discovery = StaticDiscovery(["prefill=127.0.0.1:7001", "decode=127.0.0.1:7002"])

    async def change(self) -> bool:
        return False


class FeedSource:
    def __init__(self) -> None:
        self.discovery = FeedDiscovery()

    async def begin(self) -> None:
        await self.discovery.put(Endpoint("a", "a:1", "prefill"), Endpoint("b", "b:1", "decode"))

    async def change(self) -> bool:
        await self.discovery.put(Endpoint("c", "c:1", "decode"))
        return True


async def static() -> Source:
    return StaticSource()


async def feed() -> Source:
    source = FeedSource()
    await source.begin()
    return source


SOURCES: dict[str, Callable[[], object]] = {"static": static, "feed": feed}


@pytest_asyncio.fixture(params=sorted(SOURCES))
async def source(request: pytest.FixtureRequest) -> AsyncIterator[Source]:
    made: Source = await SOURCES[request.param]()  # type: ignore[misc]
    yield made
    await made.discovery.close()


async def following(watch: AsyncIterator[Members]) -> Members:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(watch)


async def test_the_current_snapshot_comes_at_once(source: Source) -> None:
    members = await following(source.discovery.watch())
    assert {endpoint.pool for endpoint in members.endpoints} == {"prefill", "decode"}
    assert len({endpoint.worker_id for endpoint in members.endpoints}) == 2
    assert all(endpoint.address for endpoint in members.endpoints)


async def test_two_watches_see_the_same(source: Source) -> None:
    one, other = source.discovery.watch(), source.discovery.watch()
    assert (await following(one)).endpoints == (await following(other)).endpoints


async def test_a_change_comes_as_a_whole_snapshot_of_a_higher_revision(source: Source) -> None:
    watch = source.discovery.watch()
    before = await following(watch)
    if not await source.change():
        pytest.skip("this source never changes")
    after = await following(watch)
    assert after.revision > before.revision
    assert len(after.endpoints) == 1


async def test_nothing_comes_while_nothing_changes(source: Source) -> None:
    watch = source.discovery.watch()
    await following(watch)
    waiting = asyncio.ensure_future(anext(watch))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_closing_ends_watches_and_may_be_repeated(source: Source) -> None:
    watch = source.discovery.watch()
    await following(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.wait({waiting}, timeout=0.01)
    await source.discovery.close()
    await source.discovery.close()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(PATIENCE_S):
            await waiting


@pytest.mark.parametrize("text", ["", "decode", "decode=", "=h:1", "decode=h", "decode=h:x", "decode=:1"])
def test_a_static_endpoint_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="pool=host:port"):
        StaticDiscovery([text])
