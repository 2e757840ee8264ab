"""Canaries over the real gateway, with scripted engines whose times pass on the test's clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.kit.traffic.canary import Engine, RoutedEdge, routed

from kvasir.config.spec.traffic.routes import RouteSpec
from kvasir.core.errors import CapacityError, RequestError, UpstreamError
from kvasir.ports.traffic.rollouts import StoredRollout
from kvasir_platform.gateway.openai.schema.operation import RolloutOrdered
from kvasir_platform.gateway.traffic.memory_rollouts import MemoryRollouts
from kvasir_platform.gateway.traffic.rollouts import Rollouts

CANARY = {"model": "second", "steps": [0.4, 0.6], "step_s": 5, "min_requests": 40}
ROUTE: dict[str, Any] = {"name": "chat", "model": "kvasir-tiny", "canary": CANARY}


def rollout(edge: RoutedEdge) -> RolloutOrdered:
    """The rollout as operators see it."""
    (view,) = edge.rollouts.views()
    return view


async def until_ended(edge: RoutedEdge, most: int) -> list[int]:
    """Send requests until the rollout has ended; return the statuses of all of them."""
    statuses: list[int] = []
    while len(statuses) < most and rollout(edge).phase == "running":
        statuses += [response.status_code for response in await edge.chats(20)]
        await edge.rollouts.step()
    return statuses


async def test_a_canary_that_is_slower_by_30_percent_rolls_back_by_itself() -> None:
    slower = Engine(ttft_s=0.26, itl_s=0.026)
    async with routed(ROUTE, engines={"second": slower}) as edge:
        await edge.rollouts.order("chat", "start")
        statuses = await until_ended(edge, 1500)
        view = rollout(edge)
        assert (view.phase, view.share) == ("rolled_back", 0.0)
        assert "than that of the route's model" in view.reason
        assert set(statuses) == {200}
        # From the next request on, none goes to the canary.
        sent = len(edge.router.streams)
        await edge.chats(10)
        assert set(edge.served[sent:]) == {"kvasir-tiny"}


async def test_an_equal_canary_is_promoted_and_then_gets_all_requests() -> None:
    async with routed(ROUTE) as edge:
        await edge.rollouts.order("chat", "start")
        statuses = await until_ended(edge, 1500)
        assert rollout(edge).phase == "promoted"
        assert set(statuses) == {200}
        sent = len(edge.router.streams)
        shown = {response.json()["model"] for response in await edge.chats(10)}
        assert set(edge.served[sent:]) == shown == {"second"}
        undone = await edge.rollouts.order("chat", "undo")
        assert (undone.phase, undone.share) == ("rolled_back", 0.0)
        sent = len(edge.router.streams)
        await edge.chats(5)
        assert set(edge.served[sent:]) == {"kvasir-tiny"}


async def test_a_canary_that_fails_rolls_back_and_no_client_sees_a_failure() -> None:
    broken = Engine(fails=0.5, error=UpstreamError("the worker ended the request"))
    async with routed(ROUTE, engines={"second": broken}) as edge:
        await edge.rollouts.order("chat", "start")
        statuses = await until_ended(edge, 1500)
        view = rollout(edge)
        assert view.phase == "rolled_back"
        assert view.reason.startswith("it fails more often")
        assert set(statuses) == {200}
        assert view.counts["canary_failed"] >= 9
        assert b'kvasir_route_fallbacks_total{arm="second",route="chat"}' in edge.metrics.render()


async def test_a_refusal_of_the_canary_counts_and_its_request_is_answered() -> None:
    async with routed(ROUTE) as edge:
        edge.router.refusals["second"] = CapacityError("the queue is full")
        await edge.rollouts.order("chat", "start")
        assert set(await until_ended(edge, 1500)) == {200}
        assert rollout(edge).phase == "rolled_back"
        assert set(edge.served) == {"kvasir-tiny"}


async def test_until_it_is_started_and_while_it_is_paused_the_share_stays() -> None:
    async with routed(ROUTE) as edge:
        await edge.chats(20)
        assert set(edge.served) == {"kvasir-tiny"}
        await edge.rollouts.order("chat", "start")
        await edge.rollouts.order("chat", "pause")
        await edge.chats(80)
        for _ in range(3):
            await edge.rollouts.step()
        view = rollout(edge)
        assert (view.phase, view.share) == ("paused", 0.4)
        assert view.compared > 15
        assert (await edge.rollouts.order("chat", "abort")).phase == "rolled_back"
        with pytest.raises(RequestError, match="abort applies to one that is running or paused"):
            await edge.rollouts.order("chat", "abort")


async def test_a_session_stays_with_its_arm_through_a_step() -> None:
    async with routed(ROUTE) as edge:
        await edge.rollouts.order("chat", "start")
        headers = {"x-session-id": "one"}
        shown = {(await edge.chat(headers=headers)).json()["model"] for _ in range(10)}
        assert len(shown) == 1


async def test_routers_that_share_a_store_agree_on_each_step_and_on_orders() -> None:
    store = MemoryRollouts()
    async with routed(ROUTE, store=store) as edge:
        other = Rollouts([RouteSpec.model_validate(ROUTE)], store, edge.clock, edge.clock.now)
        await other.order("chat", "start")
        await edge.rollouts.step()
        assert edge.rollouts.shares() == other.shares() == {"chat": 0.4}
        await edge.chats(120)
        await edge.rollouts.step()
        await other.step()
        # The requests of one router are enough for both, and only one of them took the step.
        assert edge.rollouts.shares() == other.shares() == {"chat": 0.6}
        assert [view.step for view in (*edge.rollouts.views(), *other.views())] == [1, 1]


class Unreachable(MemoryRollouts):
    """A store that does not answer."""

    down = False

    async def add(self, route: str, run: int, counts: Mapping[str, int]) -> StoredRollout:
        if self.down:
            raise UpstreamError("Redis does not answer", code="rollouts_unavailable")
        return await super().add(route, run, counts)


async def test_while_the_store_does_not_answer_the_share_stays_and_orders_are_refused() -> None:
    store = Unreachable()
    async with routed(ROUTE, store=store, engines={"second": Engine(ttft_s=2.0)}) as edge:
        await edge.rollouts.order("chat", "start")
        store.down = True
        await edge.chats(100)
        await edge.rollouts.step()
        edge.clock.at += 5
        assert edge.rollouts.shares() == {"chat": 0.4}
        assert rollout(edge).stale_s >= 5
        with pytest.raises(UpstreamError):
            await edge.rollouts.order("chat", "pause")
        store.down = False
        await until_ended(edge, 1500)
        assert rollout(edge).phase == "rolled_back"
