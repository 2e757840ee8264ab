"""A router detects a silent worker, and does not blame a worker for its own stalls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from kvasir.core.errors import ProtocolError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.membership import Endpoint
from kvasir.core.messages import Draining, Hello, RouterFrame, SetDraining, Welcome, WorkerFrame
from kvasir.core.requests import EngineLoad, StepBatch
from kvasir.ports.session import ConnectionLost
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.net.discovery import FeedDiscovery
from kvasir_platform.sim.stories import small_deployment
from kvasir_router.build import make_router
from kvasir_router.sessions.inactivity import HURRY_S, SessionPatience, wait_inactive
from kvasir_router.sessions.session import (
    SessionEvent,
    SessionInterrupted,
    SessionLimits,
    SessionLost,
    SessionMessage,
    SessionReady,
    WorkerSession,
)
from kvasir_router.shell import Router

ACK = WorkerFrame(0, 0)
MakeIdentity = Callable[..., WorkerIdentity]


class StallingClock(VirtualClock):
    """Its loop can stand still: time then passes that nobody was awake for."""

    def __init__(self) -> None:
        self._stalled_s = 0.0

    def now(self) -> float:
        return super().now() + self._stalled_s

    def stall(self, seconds: float) -> None:
        self._stalled_s += seconds


class Line:
    """One connection, on which a test speaks for the worker. Even closed, it goes on bringing what comes."""

    def __init__(self, hello: Hello, identity: WorkerIdentity, resumed: bool) -> None:
        self.hello = hello
        self.welcome = Welcome(hello.session_id if resumed else "s", resumed, 0, identity)
        self.said: asyncio.Queue[WorkerFrame] = asyncio.Queue()
        self.heard: list[RouterFrame] = []
        self.closed = False

    async def send(self, frame: RouterFrame) -> None:
        self.heard.append(frame)

    async def receive(self) -> WorkerFrame:
        return await self.said.get()

    async def close(self) -> None:
        self.closed = True


@dataclass
class Lines:
    """Dials: each gives a line, or nothing within a second, as over a network, while `answers` is False."""

    clock: VirtualClock
    identity: WorkerIdentity
    answers: bool = True
    refusal: str | None = None
    resumes: bool = True
    made: list[Line] = field(default_factory=list)
    dialed_s: list[float] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def dial(self, address: str, hello: Hello) -> Line:
        self.dialed_s.append(self.clock.now())
        if self.refusal is not None:
            raise ProtocolError(self.refusal)
        if not self.answers:
            await self.clock.sleep(1.0)
            raise ConnectionLost("no answer")
        self.made.append(Line(hello, self.identity, self.resumes and bool(hello.session_id)))
        self.changed.set()
        return self.made[-1]

    async def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        raise ConnectionLost("no snapshots here")
        yield

    async def line(self, number: int) -> Line:
        while len(self.made) <= number:
            self.changed.clear()
            await self.changed.wait()
        return self.made[number]


@dataclass
class Scene:
    """A session with what it told, and when."""

    clock: StallingClock
    lines: Lines
    session: WorkerSession
    told: list[tuple[float, SessionEvent]]

    def events(self, kind: type) -> list[Any]:
        return [event for _, event in self.told if isinstance(event, kind)]

    def times(self, kind: type) -> list[float]:
        return [at for at, event in self.told if isinstance(event, kind)]


Play = Callable[..., None]


@pytest.fixture
def play(make_identity: MakeIdentity) -> Play:
    """Runs a scene with one session in virtual time."""

    def play(scene: Callable[[Scene], Awaitable[None]], **limits: Any) -> None:
        async def main() -> None:
            clock = StallingClock()
            lines = Lines(clock, make_identity("w"))
            told: list[tuple[float, SessionEvent]] = []
            session = WorkerSession(
                Endpoint("w", "a", "pool"),
                lines,
                clock=clock,
                rng=Random(3),
                on_event=lambda event: told.append((clock.now(), event)),
                router_id="r",
                limits=SessionLimits(**limits),
            )
            running = asyncio.ensure_future(session.run())
            await scene(Scene(clock, lines, session, told))
            await session.close()
            await running

        run_virtual(main())

    return play


async def beat(clock: VirtualClock, line: Line, every_s: float, times: int) -> None:
    for _ in range(times):
        await clock.sleep(every_s)
        line.said.put_nowait(ACK)


def test_a_connection_on_which_nothing_comes_is_broken_and_dialed_anew_at_once(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        await scene.lines.line(1)
        (broken,) = scene.events(SessionInterrupted)
        assert broken == SessionInterrupted("w", "no frame for 1.5 s")
        assert scene.lines.dialed_s == [0.0, pytest.approx(1.5)]
        assert scene.lines.made[0].closed
        await scene.clock.sleep(0.1)
        assert [event.resumed for event in scene.events(SessionReady)] == [False, True]

    play(scene)


def test_a_silence_counts_from_the_last_frame_and_is_found_to_the_moment(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        line = await scene.lines.line(0)
        await beat(scene.clock, line, 0.7, 3)
        await scene.lines.line(1)
        assert scene.times(SessionInterrupted) == [pytest.approx(2.1 + 1.5)]

    play(scene)


def test_bare_acknowledgements_are_life_enough(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        await beat(scene.clock, await scene.lines.line(0), 1.4, 1000)
        assert not scene.events(SessionInterrupted)

    play(scene)


def test_a_stall_of_the_routers_own_loop_is_not_the_workers_silence(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        line = await scene.lines.line(0)
        for _ in range(20):
            await beat(scene.clock, line, 0.5, 2)
            await scene.clock.sleep(0.4)
            scene.clock.stall(30.0)
            # What the worker said meanwhile is read a little after the loop goes on.
            await beat(scene.clock, line, 0.2, 1)
        assert not scene.events(SessionInterrupted)

    play(scene)


def test_a_stall_that_ends_a_long_silence_leaves_time_to_read_what_came_in_it(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        line = await scene.lines.line(0)
        await scene.clock.sleep(1.45)
        scene.clock.stall(30.0)
        await scene.clock.sleep(0.25)
        line.said.put_nowait(ACK)
        await scene.clock.sleep(0.5)
        assert not scene.events(SessionInterrupted)

    play(scene)


def test_a_worker_that_is_silent_after_a_stall_is_found_all_the_same(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        await scene.lines.line(0)
        await scene.clock.sleep(0.1)
        scene.clock.stall(30.0)
        await scene.lines.line(1)
        (at,) = scene.times(SessionInterrupted)
        assert 31.5 <= at <= 32.0

    play(scene)


def test_nothing_that_comes_over_an_abandoned_connection_is_processed(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        old = await scene.lines.line(0)
        await scene.lines.line(1)
        for sequence in (1, 2, 3):
            old.said.put_nowait(WorkerFrame(sequence, 0, Draining("late", 1.0)))
        await scene.clock.sleep(0.5)
        assert not scene.events(SessionMessage)
        scene.lines.made[1].said.put_nowait(WorkerFrame(1, 0, Draining("told again", 1.0)))
        await scene.clock.sleep(0.1)
        assert scene.events(SessionMessage) == [SessionMessage("w", Draining("told again", 1.0))]
        assert scene.lines.made[1].hello.received_seq == 0

    play(scene)


def test_a_silent_worker_is_dialed_again_and_again_at_a_quick_pace(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        await scene.lines.line(0)
        scene.lines.answers = False
        await scene.clock.sleep(9.0)
        first, *later = scene.lines.dialed_s[1:]
        assert first == pytest.approx(1.5)
        assert len(later) >= 4
        gaps = [b - a for a, b in zip([first, *later], later, strict=False)]
        assert gaps[0] < 1.1
        assert max(gaps) <= 2.0

    play(scene)


def test_a_silence_longer_than_the_window_is_the_sessions_end_and_a_clean_one_follows(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        await scene.lines.line(0)
        scene.lines.answers = False
        await scene.clock.sleep(6.0)
        assert scene.times(SessionLost) == [pytest.approx(1.5 + 3.0)]
        scene.lines.answers = True
        fresh = await scene.lines.line(1)
        assert fresh.hello == Hello("r")
        await scene.clock.sleep(0.1)
        assert [event.resumed for event in scene.events(SessionReady)] == [False, False]

    play(scene, resume_window_s=3.0)


def test_a_drain_that_is_asked_for_during_the_silence_is_said_when_the_worker_is_back(play: Play) -> None:
    async def scene(scene: Scene) -> None:
        await scene.lines.line(0)
        scene.lines.answers = False
        await scene.clock.sleep(2.0)
        scene.session.send(SetDraining(True, "update"))
        scene.lines.answers = True
        line = await scene.lines.line(1)
        await scene.clock.sleep(0.1)
        assert [frame.payload for frame in line.heard] == [SetDraining(True, "update")]

    play(scene)


def with_router(identity: WorkerIdentity, story: Callable[[Router, Lines], Awaitable[None]]) -> None:
    """A whole router with one worker, for which the story speaks."""

    async def main() -> None:
        clock, discovery = VirtualClock(), FeedDiscovery()
        lines = Lines(clock, identity)
        router = make_router(
            small_deployment(0, 0, 1, "never"),
            tokenizer_digest="t",
            discovery=discovery,
            dialer=lines,
            clock=clock,
            rng=Random(1),
            router_id="r",
        )
        running = asyncio.ensure_future(router.run())
        await discovery.put(Endpoint("w", "a", "both"))
        await story(router, lines)
        await router.close()
        await running
        await discovery.close()

    run_virtual(main())


def test_a_worker_whose_loads_stop_coming_keeps_its_last_one(make_identity: MakeIdentity) -> None:
    async def story(router: Router, lines: Lines) -> None:
        line = await lines.line(0)
        line.said.put_nowait(WorkerFrame(1, 0, StepBatch(load=EngineLoad(running=7))))
        await beat(lines.clock, line, 1.0, 100)
        (view,) = router.workers()
        assert (view.state, view.load) == ("ready", EngineLoad(running=7))
        assert router.not_ready_reason() is None

    with_router(make_identity("w", model="kvasir-tiny"), story)


def test_a_silent_worker_is_shown_with_the_reason(make_identity: MakeIdentity) -> None:
    async def story(router: Router, lines: Lines) -> None:
        await lines.line(0)
        await lines.clock.sleep(1.0)
        (view,) = router.workers()
        assert (view.state, view.health.state) == ("ready", "healthy")
        lines.answers = False
        await lines.clock.sleep(1.0)
        (view,) = router.workers()
        assert (view.state, view.reason) == ("interrupted", "no frame for 1.5 s")
        assert view.health.state == "unresponsive"

    with_router(make_identity("w", model="kvasir-tiny"), story)


def test_a_worker_that_nobody_can_reach_is_shown_with_what_the_last_dial_met(
    make_identity: MakeIdentity,
) -> None:
    async def story(router: Router, lines: Lines) -> None:
        await lines.line(0)
        lines.answers = False
        await lines.clock.sleep(30.0)
        (view,) = router.workers()
        assert (view.state, view.reason) == ("connecting", "no answer")

    with_router(make_identity("w", model="kvasir-tiny"), story)


def test_a_worker_that_refuses_is_shown_so_after_its_session_has_ended_too(
    make_identity: MakeIdentity,
) -> None:
    async def story(router: Router, lines: Lines) -> None:
        await lines.line(0)
        lines.refusal = "another certificate"
        await lines.clock.sleep(30.0)
        (view,) = router.workers()
        assert (view.state, view.reason) == ("refused", "another certificate")

    with_router(make_identity("w", model="kvasir-tiny"), story)


def test_once_a_worker_fell_silent_the_others_are_waited_for_less_long_for_some_time() -> None:
    clock = VirtualClock()
    waited: list[float] = []

    async def main() -> None:
        patience = SessionPatience(1.5, 0.8, clock.now)

        async def wait() -> None:
            waited.append(await wait_inactive(lambda: 0.0, patience.timeout_s, clock))
            patience.hurry()

        first = asyncio.ensure_future(wait())
        await first
        assert clock.now() == pytest.approx(1.5)
        await wait()
        assert clock.now() == pytest.approx(1.5 + 0.8)
        await clock.sleep(HURRY_S)
        await wait()

    run_virtual(main())
    assert waited == [1.5, 0.8, 1.5]


def test_nobody_is_waited_for_longer_in_a_hurry() -> None:
    patience = SessionPatience(0.5, 0.8, lambda: 0.0)
    patience.hurry()
    assert patience.timeout_s() == 0.5
