"""Contract of the store of responses: in memory, and over an edge's link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from tests.kit.gateway.edge_link import core_parts, linked
from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.config.spec.edge import ResponsesSpec
from kvasir.ports.responses import ResponseStore, StoredResponse, StoredStatus
from kvasir_platform.gateway.responses.memory_store import MemoryResponses

PATIENCE_S = 30.0
Ask = Callable[[str, str, Callable[[StoredResponse | None], None]], None]


@pytest_asyncio.fixture(params=["memory", "link"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ResponseStore]:
    if request.param == "memory":
        yield MemoryResponses(ResponsesSpec(), MonotonicClock().now)
        return
    async with linked(core_parts(ScriptedRouter(MonotonicClock()))) as both:
        yield both.link.responses


async def asked(ask: Ask, name: str = "a", tenant: str = "t") -> StoredResponse | None:
    answer: asyncio.Future[StoredResponse | None] = asyncio.get_running_loop().create_future()
    ask(tenant, name, answer.set_result)
    async with asyncio.timeout(PATIENCE_S):
        return await answer


def response(body: bytes = b"{}", status: StoredStatus = "ended") -> StoredResponse:
    return StoredResponse("t", "a", body, b"[]", status)


async def test_what_is_put_is_found_by_its_tenant_in_its_last_state(store: ResponseStore) -> None:
    store.put(response(b"1"))
    store.put(response(b"2"))
    assert await asked(store.find) == response(b"2")
    assert await asked(store.find, tenant="other") is None
    assert await asked(store.find, "b") is None


async def test_what_is_removed_is_returned_once(store: ResponseStore) -> None:
    store.put(response())
    assert await asked(store.remove) == response()
    assert await asked(store.remove) is None
    assert await asked(store.find) is None


async def test_a_running_response_hears_once_that_it_is_cancelled(store: ResponseStore) -> None:
    stops: list[str] = []
    store.put(response(status="running"), lambda: stops.append("a"))
    for _ in range(2):
        cancelled = await asked(store.cancel)
        assert cancelled is not None
        assert cancelled.status == "cancelled"
    store.put(response(b"late"))
    assert await asked(store.find) == response(status="cancelled")
    assert stops == ["a"]


async def test_a_running_response_that_is_removed_hears_of_it(store: ResponseStore) -> None:
    stops: list[str] = []
    store.put(response(status="running"), lambda: stops.append("a"))
    await asked(store.remove)
    assert stops == ["a"]


async def test_a_response_that_has_ended_cannot_be_cancelled(store: ResponseStore) -> None:
    stops: list[str] = []
    store.put(response(status="running"), lambda: stops.append("a"))
    store.put(response(b"done"))
    assert await asked(store.cancel) == response(b"done")
    assert not stops
