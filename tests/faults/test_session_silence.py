"""Workers that stop or become unreachable silently, and return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import Abort, Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.ports.session import ConnectionLost, RouterConnection
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_router.sessions.session import SessionInterrupted, SessionLimits, SessionLost, SessionReady
from kvasir_workers.server.sessions import SessionHostLimits

DIAL_S = 1.0


class Far:
    """A network whose link can go dark: what is under way is held, and nobody is told of a close. When the
    link is back, all of it arrives."""

    def __init__(self, network: MemoryNetwork, clock: VirtualClock) -> None:
        self.network = network
        self.clock = clock
        self.lit = asyncio.Event()
        self.lit.set()
        self.late: set[asyncio.Task[None]] = set()

    async def dial(self, address: str, hello: Hello) -> RouterConnection:
        answer = asyncio.ensure_future(self.network.dial(address, hello)) if self.lit.is_set() else None
        if answer is None:
            await self.clock.sleep(DIAL_S)
            raise ConnectionLost("no answer")
        return FarConnection(self, await answer)

    async def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        async for part in self.network.snapshot(address, epoch):
            yield part


class FarConnection:
    def __init__(self, far: Far, near: RouterConnection) -> None:
        self._far = far
        self._near = near

    @property
    def welcome(self) -> Welcome:
        return self._near.welcome

    async def send(self, frame: RouterFrame) -> None:
        await self._far.lit.wait()
        await self._near.send(frame)

    async def receive(self) -> WorkerFrame:
        await self._far.lit.wait()
        frame = await self._near.receive()
        await self._far.lit.wait()
        return frame

    async def close(self) -> None:
        async def when_lit() -> None:
            await self._far.lit.wait()
            # The worker hears of the new connection before it notices that this one has ended.
            await self._far.clock.sleep(0.05)
            await self._near.close()

        task = asyncio.ensure_future(when_lit())
        self._far.late.add(task)
        task.add_done_callback(self._far.late.discard)


Scenario = Callable[[Any, MemoryNetwork, Far], Coroutine[Any, Any, None]]
Play = Callable[[Scenario], None]


@pytest.fixture
def play(make_bench: Any) -> Play:
    """Runs a scenario in virtual time and ends all that it made."""

    def play(scenario: Scenario) -> None:
        async def main() -> None:
            clock, network = VirtualClock(), MemoryNetwork()
            bench, far = make_bench(clock), Far(network, clock)
            await scenario(bench, network, far)
            await bench.close()
            far.lit.set()
            if far.late:
                await asyncio.wait(far.late)
            await network.close()

        run_virtual(main())

    return play


def kinds(router: Any) -> list[type]:
    return [type(event) for event in router.told()]


@pytest.mark.parametrize("dark_at", [0.001, 0.1, 0.25, 0.4993])
@pytest.mark.parametrize("dark_s", [1.6, 2.0, 4.0, 9.0])
def test_streams_through_a_partition_are_whole_when_it_heals_within_the_window(
    play: Play, dark_at: float, dark_s: float
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, far: Far) -> None:
        host, engine = await bench.host(SessionHostLimits(resume_window_s=10.0))
        network.listen("w", host.serve)
        router = bench.router(far, "w", limits=SessionLimits())
        await router.ready()
        router.session.send(bench.submit(("a", 100, 400), ("b", 1000, 90)))
        await bench.clock.sleep(dark_at)
        far.lit.clear()
        went_dark = bench.clock.now()
        router.session.send(bench.submit(("c", 5000, 5)))
        await router.until(lambda: SessionInterrupted in kinds(router))
        assert bench.clock.now() - went_dark <= 2.0
        await bench.clock.sleep(went_dark + dark_s - bench.clock.now())
        far.lit.set()
        await router.ended("a", "b", "c")
        assert router.tokens == {
            "a": list(range(100, 500)),
            "b": list(range(1000, 1090)),
            "c": list(range(5000, 5005)),
        }
        assert kinds(router) == [SessionReady, SessionInterrupted, SessionReady]
        assert sorted(engine.submitted) == ["a", "b", "c"]
        assert host.sessions == 1
        await bench.clock.sleep(60.0)
        assert kinds(router) == [SessionReady, SessionInterrupted, SessionReady]

    play(scenario)


def test_legs_that_were_given_up_in_the_silence_are_aborted_when_the_worker_is_back(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, far: Far) -> None:
        host, engine = await bench.host(SessionHostLimits(resume_window_s=10.0))
        network.listen("w", host.serve)
        router = bench.router(far, "w", limits=SessionLimits())
        await router.ready()
        router.session.send(bench.submit(("a", 1, 2000)))
        await router.until(lambda: "a" in router.tokens)
        far.lit.clear()
        await router.until(lambda: SessionInterrupted in kinds(router))
        router.session.send(Abort(("a",)))
        far.lit.set()
        await router.ended("a")
        assert engine.aborted == ["a"]
        assert host.live_requests == 0

    play(scenario)


def test_a_worker_that_is_back_after_the_window_gets_a_clean_session_and_runs_nothing_of_the_old(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, far: Far) -> None:
        host, engine = await bench.host(SessionHostLimits(resume_window_s=30.0))
        network.listen("w", host.serve)
        router = bench.router(far, "w", limits=SessionLimits(resume_window_s=3.0))
        await router.ready()
        router.session.send(bench.submit(("a", 1, 2000)))
        await router.until(lambda: "a" in router.tokens)
        far.lit.clear()
        await router.until(lambda: SessionLost in kinds(router))
        known = len(router.tokens["a"])
        far.lit.set()
        await router.ready(2)
        assert kinds(router) == [SessionReady, SessionInterrupted, SessionLost, SessionReady]
        assert not router.told()[-1].resumed
        await bench.clock.sleep(1.0)
        assert engine.aborted == ["a"]
        assert (host.sessions, host.live_requests) == (1, 0)
        assert len(router.tokens["a"]) == known
        router.session.send(bench.submit(("b", 50, 3)))
        await router.ended("b")
        assert router.tokens["b"] == [50, 51, 52]

    play(scenario)


def test_an_idle_session_is_never_taken_for_a_silent_one(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, far: Far) -> None:
        host, _ = await bench.host(SessionHostLimits())
        network.listen("w", host.serve)
        routers = [bench.router(far, "w", f"r{i}", SessionLimits()) for i in range(3)]
        for router in routers:
            await router.ready()
        await bench.clock.sleep(120.0)
        assert all(kinds(router) == [SessionReady] for router in routers)

    play(scenario)
