"""How a replica handles the follower nodes of its engine. Ray's part is tested in tests/e2e."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvasir.core.errors import EngineStartError
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.pool.followers import Followers
from kvasir_workers.pool.replica import Node, _started_with

PLACE = NodePlace(0, "10.0.0.1", "10.0.0.1", 4000, 4001)


@dataclass(slots=True)
class Method:
    """As an actor's: `remote` begins a call."""

    answer: asyncio.Future[Any] = field(default_factory=asyncio.Future)
    asked: list[Any] = field(default_factory=list)

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        self.asked.append(arguments)
        return self.answer


@dataclass(slots=True)
class Actor:
    run: Method = field(default_factory=Method)
    asked_to_end: Method = field(default_factory=Method)


async def two() -> tuple[Actor, Actor, Followers]:
    first, second = Actor(), Actor()
    followers = Followers([first, second])
    followers.start(PLACE)
    await asyncio.sleep(0)
    return first, second, followers


async def test_every_further_node_is_told_where_the_first_one_is() -> None:
    first, second, _ = await two()
    assert first.run.asked == second.run.asked == [(PLACE,)]


async def test_a_node_whose_ranks_end_is_lost_with_its_reason() -> None:
    _, second, followers = await two()
    second.run.answer.set_result("a rank of node 2 ended")
    assert await followers.lost() == "a rank of node 2 ended"


async def test_a_node_that_does_not_start_gives_its_own_error_to_the_replica() -> None:
    first, _, followers = await two()
    reason = EngineStartError("node 1 of pool decode does not start: no memory", permanent=True)
    wrapped = RuntimeError("ray::EngineFollower.run() Traceback (most recent call last): ...")
    wrapped.cause = reason  # type: ignore[attr-defined]  # as Ray wraps what an actor raises
    first.run.answer.set_exception(wrapped)
    assert await followers.lost() == f"a further node of the engine was lost: {reason.message}"
    with pytest.raises(EngineStartError) as caught:
        await _started_with(followers, cast("Awaitable[Node]", asyncio.Event().wait()))
    assert caught.value is reason


async def test_a_node_whose_process_is_gone_is_lost_too() -> None:
    first, _, followers = await two()
    first.run.answer.set_exception(RuntimeError("the actor died"))
    assert await followers.lost() == "a further node of the engine was lost: the actor died"


async def test_one_node_that_is_asked_to_end_asks_for_all() -> None:
    _, second, followers = await two()
    asked = asyncio.create_task(followers.asked_to_end())
    await asyncio.sleep(0)
    second.asked_to_end.answer.set_result(None)
    await asked


async def test_a_node_that_is_lost_has_not_been_asked_to_end() -> None:
    first, second, followers = await two()
    first.asked_to_end.answer.set_exception(RuntimeError("the actor died"))
    asked = asyncio.create_task(followers.asked_to_end())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not asked.done()
    second.asked_to_end.answer.set_result(None)
    await asked


async def test_a_worker_that_waits_for_a_lost_node_does_not_start() -> None:
    first, _, followers = await two()
    never: asyncio.Future[Node] = asyncio.Future()
    first.run.answer.set_exception(RuntimeError("no such model"))
    with pytest.raises(RuntimeError, match="no such model"):
        await _started_with(followers, never)


async def test_a_worker_that_starts_is_there_while_its_nodes_run() -> None:
    _, _, followers = await two()
    node = cast(Node, object())
    started: asyncio.Future[Node] = asyncio.Future()
    started.set_result(node)
    assert await _started_with(followers, started) is node
