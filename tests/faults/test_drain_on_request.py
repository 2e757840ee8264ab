"""A worker that is drained informs every router, accepts no requests, and can be undrained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvasir.core.errors import UpstreamError
from kvasir.core.messages import Draining, EncodedStep, Serving, SetDraining, WorkerMessage
from kvasir.core.requests import StepBatch
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_router.sessions.session import SessionMessage
from kvasir_workers.server.refusals import ON_REQUEST, WORKER_DRAINING

Scenario = Callable[[Any, MemoryNetwork], Coroutine[Any, Any, None]]
Play = Callable[[Scenario], None]


@pytest.fixture
def play(make_bench: Any) -> Play:
    """Runs a scenario in virtual time and ends all that it made."""

    def play(scenario: Scenario) -> None:
        async def main() -> None:
            bench, network = make_bench(VirtualClock()), MemoryNetwork()
            await scenario(bench, network)
            await bench.close()
            await network.close()

        run_virtual(main())

    return play


def said(router: Any) -> list[WorkerMessage]:
    """What the worker told of its service."""
    messages = [event.message for event in router.events if isinstance(event, SessionMessage)]
    return [message for message in messages if not isinstance(message, StepBatch | EncodedStep)]


def test_a_drain_through_one_router_reaches_all_and_so_does_its_end(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        routers = [bench.router(network, "w", f"r{i}") for i in range(3)]
        for router in routers:
            await router.ready()
        routers[0].session.send(bench.submit(("old", 1, 40)))
        await routers[0].until(lambda: "old" in routers[0].tokens)
        routers[1].session.send(SetDraining(True, "kernel update", 7.0))
        for router in routers:
            await router.until(lambda router=router: bool(said(router)))
            assert said(router) == [Draining("kernel update", 7.0)]
        routers[2].session.send(bench.submit(("new", 1, 1)))
        await routers[2].ended("new")
        assert routers[2].last["new"].error == WORKER_DRAINING
        await routers[0].ended("old")
        assert routers[0].tokens["old"] == list(range(1, 41))
        late = bench.router(network, "w", "late")
        await late.until(lambda: bool(said(late)))
        routers[2].session.send(SetDraining(False))
        for router in (*routers, late):
            await router.until(lambda router=router: len(said(router)) == 2)
            assert said(router) == [Draining("kernel update", 7.0), Serving()]
        routers[0].session.send(bench.submit(("again", 1, 3)))
        await routers[0].ended("again")
        assert routers[0].tokens["again"] == [1, 2, 3]
        fresh = bench.router(network, "w", "fresh")
        await fresh.ready()
        await bench.clock.sleep(1.0)
        assert said(fresh) == []

    play(scenario)


def test_a_worker_that_is_being_stopped_goes_on_draining_whatever_it_is_asked(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(SetDraining(True, "look at it"))
        await router.until(lambda: bool(said(router)))
        router.session.send(bench.submit(("x", 1, 1)))
        stopping = asyncio.ensure_future(host.drain("stopping", 2.0))
        await router.until(lambda: len(said(router)) == 2)
        router.session.send(SetDraining(False))
        await bench.clock.sleep(0.5)
        router.session.send(bench.submit(("y", 1, 1)))
        await router.ended("y")
        assert router.last["y"].error == WORKER_DRAINING
        assert said(router) == [Draining("look at it", 0.0), Draining("stopping", 2.0)]
        assert await stopping

    play(scenario)


def test_a_drain_without_a_reason_still_has_one_and_asking_twice_says_nothing_new(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(SetDraining(False))
        router.session.send(SetDraining(True))
        router.session.send(SetDraining(True))
        await bench.clock.sleep(0.5)
        assert said(router) == [Draining(ON_REQUEST, 0.0)]

    play(scenario)


def test_a_drain_that_cannot_be_said_is_an_error_and_not_forgotten(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        router = bench.router(network, "w")
        with pytest.raises(UpstreamError) as caught:
            router.session.send(SetDraining(True))
        assert caught.value.code == "session_lost"

    play(scenario)
