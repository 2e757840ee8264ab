"""Connections break at every moment without effect on streams. Sessions end only when they must, one at a
time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from kvasir.core.errors import RequestError, UpstreamError
from kvasir.core.identity import PROTOCOL_VERSION
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.messages import Abort, Draining, Hello, ReleaseLeases, RouterFrame, Submit
from kvasir.core.requests import EngineLoad, FinishReason, Leg, StepBatch
from kvasir.core.session_link import LinkLimits
from kvasir.ports.session import ConnectionLost, RouterConnection, WorkerConnection
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_router.sessions.session import (
    SessionEvent,
    SessionInterrupted,
    SessionLimits,
    SessionLost,
    SessionMessage,
    SessionReady,
    SessionRefused,
)
from kvasir_workers.server.refusals import WORKER_DRAINING, WORKER_OVERLOADED
from kvasir_workers.server.sessions import SessionHostLimits

LINK = LinkLimits(tail_messages=64, tail_bytes=1 << 20, ack_every=4, ack_delay_s=0.01)
WANTED = (("a", 100, 6), ("b", 200, 9), ("c", 300, 1))
TOKENS = {name: list(range(first, first + count)) for name, first, count in WANTED}

Scenario = Callable[[Any, MemoryNetwork], Coroutine[Any, Any, Any]]
Play = Callable[..., Any]


@pytest.fixture
def play(make_bench: Any) -> Play:
    """Runs a scenario in virtual time and ends all that it made."""

    def play(scenario: Scenario, capacity: int = 16) -> Any:
        async def main() -> Any:
            bench, network = make_bench(VirtualClock()), MemoryNetwork(capacity)
            result = await scenario(bench, network)
            await bench.close()
            await network.close()
            return result

        return run_virtual(main())

    return play


def kinds(router: Any) -> list[type]:
    return [type(event) for event in router.told()]


async def whole_stream(bench: Any, network: MemoryNetwork) -> int:
    """Three streams from end to end, whatever the network does; returns its passages."""
    host, engine = await bench.host()
    network.listen("w", host.serve)
    router = bench.router(network, "w")
    await router.ready()
    router.session.send(bench.submit(*WANTED))
    await router.ended("a", "b", "c")
    assert router.tokens == TOKENS
    assert sorted(engine.submitted) == ["a", "b", "c"]
    assert engine.aborted == []
    assert SessionLost not in kinds(router)
    assert all(e.resumed for e in router.told()[1:] if isinstance(e, SessionReady))
    assert host.live_requests == 0
    return network.passages


def test_a_connection_cut_at_any_point_costs_no_token_and_repeats_none(
    play: Play,
) -> None:
    passages = play(whole_stream)
    assert passages > 25
    for passage in range(1, passages + 1):

        async def scenario(bench: Any, network: MemoryNetwork, passage: int = passage) -> None:
            network.cut_at(passage)
            await whole_stream(bench, network)

        play(scenario)


@pytest.mark.parametrize("gap", range(6, 16))
def test_a_connection_that_breaks_again_and_again_still_delivers_everything_once(
    play: Play, gap: int
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        async def saboteur() -> None:
            while True:
                network.cut_at(network.passages + gap)
                await bench.clock.sleep(0.03)

        sabotage = asyncio.ensure_future(saboteur())
        await whole_stream(bench, network)
        sabotage.cancel()

    play(scenario, capacity=1)


def test_a_router_that_does_not_come_back_has_its_requests_aborted_and_its_leases_released(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host(SessionHostLimits(resume_window_s=1.0))
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("p", 1, 1), leg=Leg.PREFILL))
        router.session.send(bench.submit(("long", 1, 4000)))
        await router.ended("p")
        assert host.held_leases == 1
        network.unlisten("w")
        network.cut()
        await bench.clock.sleep(0.95)
        assert engine.aborted == engine.released == []
        await bench.clock.sleep(0.1)
        assert engine.aborted == ["long"]
        assert engine.released == ["lease-p"]
        assert host.sessions == host.live_requests == host.held_leases == 0
        network.listen("w", host.serve)
        await router.ready(2)
        assert kinds(router) == [SessionReady, SessionInterrupted, SessionLost, SessionReady]
        assert not router.told()[-1].resumed

    play(scenario)


def test_two_routers_with_one_request_id_get_their_own_streams(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        one, two = bench.router(network, "w", "one"), bench.router(network, "w", "two")
        await one.ready()
        await two.ready()
        one.session.send(bench.submit(("same", 100, 20)))
        two.session.send(bench.submit(("same", 500, 4000)))
        await two.until(lambda: len(two.tokens.get("same", ())) > 5)
        two.session.send(Abort(("same", "unknown")))
        await one.ended("same")
        await two.ended("same")
        assert one.tokens["same"] == list(range(100, 120))
        assert two.tokens["same"] == list(range(500, 500 + len(two.tokens["same"])))
        assert two.last["same"].finish is FinishReason.ABORT
        assert len(set(engine.submitted)) == 2
        assert len(engine.aborted) == 1

    play(scenario)


def test_a_router_that_does_not_read_loses_its_own_session_only(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        limits = SessionHostLimits(link=LinkLimits(tail_messages=20), resume_window_s=1.0)
        host, engine = await bench.host(limits)
        network.listen("w", host.serve)
        stuck = await network.dial("w", Hello(router_id="stuck"))
        await stuck.send(RouterFrame(1, 0, bench.submit(("x", 1, 4000))))
        good = bench.router(network, "w", "good")
        await good.ready()
        good.session.send(bench.submit(("y", 1, 200)))
        await good.ended("y")
        assert good.tokens["y"] == list(range(1, 201))
        assert SessionLost not in kinds(good)
        assert engine.aborted == ["x"]
        assert host.sessions == 1
        with pytest.raises(ConnectionLost):
            await stuck.receive()

    play(scenario)


def test_a_router_away_for_longer_than_the_tail_reaches_loses_its_session_and_learns_it(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host(SessionHostLimits(link=LinkLimits(tail_messages=20)))
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("x", 1, 4000)))
        await router.until(lambda: "x" in router.tokens)
        network.unlisten("w")
        network.cut()
        await bench.clock.sleep(0.4)
        assert engine.aborted == ["x"]
        network.listen("w", host.serve)
        await router.ready(2)
        assert kinds(router) == [SessionReady, SessionInterrupted, SessionLost, SessionReady]

    play(scenario)


def test_messages_sent_while_the_connection_is_broken_arrive_after_it(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        network.unlisten("w")
        network.cut()
        await router.until(lambda: SessionInterrupted in kinds(router))
        router.session.send(bench.submit(("a", 100, 6)))
        assert engine.submitted == []
        network.listen("w", host.serve)
        await router.ended("a")
        assert router.tokens["a"] == TOKENS["a"]

    play(scenario)


def test_more_messages_than_the_tail_holds_lose_the_session_with_an_event(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        limits = SessionLimits(link=LinkLimits(tail_messages=3))
        router = bench.router(network, "w", limits=limits)
        await router.ready()
        network.unlisten("w")
        network.cut()
        await router.until(lambda: SessionInterrupted in kinds(router))
        for number in range(10):
            router.session.send(Abort((str(number),)))
            assert SessionLost not in kinds(router), "events never come from within send"
        await router.until(lambda: SessionLost in kinds(router))
        with pytest.raises(UpstreamError) as caught:
            router.session.send(bench.submit(("late", 1, 1)))
        assert caught.value.code == "session_lost"
        router.session.send(Abort(("late",)))
        network.listen("w", host.serve)
        await router.ready(2)
        assert kinds(router).count(SessionLost) == 1

    play(scenario)


def test_a_worker_that_has_forgotten_the_session_gives_lost_and_then_ready(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        first, _ = await bench.host(epoch=1)
        network.listen("w", first.serve)
        router = bench.router(network, "w")
        await router.ready()
        second, engine = await bench.host(epoch=2)
        network.listen("w", second.serve)
        network.cut()
        await router.ready(2)
        assert kinds(router) == [SessionReady, SessionInterrupted, SessionLost, SessionReady]
        ready = router.told()[-1]
        assert (ready.resumed, ready.identity.epoch) == (False, 2)
        router.session.send(bench.submit(("a", 100, 6)))
        await router.ended("a")
        assert engine.submitted == ["a"]

    play(scenario)


def test_a_draining_worker_says_so_refuses_newcomers_and_finishes_what_runs(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("old", 1, 40)))
        await router.until(lambda: "old" in router.tokens)
        draining = asyncio.ensure_future(host.drain("scaling down", 5.0))
        await router.until(lambda: SessionMessage("w", Draining("scaling down", 5.0)) in router.events)
        router.session.send(bench.submit(("new", 1, 1)))
        await router.ended("new")
        assert router.last["new"].error == WORKER_DRAINING
        assert not draining.done()
        await router.ended("old")
        assert router.tokens["old"] == list(range(1, 41))
        assert await draining
        late = bench.router(network, "w", "late")
        await late.until(lambda: any(isinstance(e, SessionMessage) for e in late.events))
        assert late.events[1] == SessionMessage("w", Draining("scaling down", 5.0))

    play(scenario)


def test_a_drain_that_outlasts_its_grace_says_so(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("long", 1, 4000)))
        await router.until(lambda: "long" in router.tokens)
        began = bench.clock.now()
        assert not await host.drain("stop", 0.5)
        assert bench.clock.now() - began == pytest.approx(0.5, abs=0.05)
        await host.close()
        assert engine.aborted == ["long"]
        await router.until(lambda: SessionInterrupted in kinds(router))

    play(scenario)


def test_a_worker_that_turns_a_router_away_is_reported_once_and_dialed_slowly(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host(SessionHostLimits(max_sessions=0))
        dials = 0

        async def serve(connection: Any) -> None:
            nonlocal dials
            dials += 1
            await host.serve(connection)

        network.listen("w", serve)
        router = bench.router(network, "w")
        await bench.clock.sleep(60)
        assert [type(e) for e in router.events] == [SessionRefused]
        assert 600 <= dials <= 1201
        roomy, _ = await bench.host()
        network.listen("w", roomy.serve)
        await router.ready()

    play(scenario)


def test_a_router_of_another_protocol_version_is_refused_with_both_versions(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        with pytest.raises(Exception, match=f"protocol_version: 99 != {PROTOCOL_VERSION}"):
            await network.dial("w", Hello(router_id="r", protocol_version=99))

    play(scenario)


def test_an_id_that_is_live_already_ends_that_session_only(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        bad, good = bench.router(network, "w", "bad"), bench.router(network, "w", "good")
        await bad.ready()
        await good.ready()
        good.session.send(bench.submit(("g", 1, 50)))
        bad.session.send(bench.submit(("x", 1, 50)))
        bad.session.send(bench.submit(("x", 1, 50)))
        await bad.ready(2)
        assert SessionLost in kinds(bad)
        await good.ended("g")
        assert good.tokens["g"] == list(range(1, 51))
        assert engine.aborted == ["x"]

    play(scenario)


def test_a_router_that_begins_anew_frees_what_its_earlier_life_ran(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        first = bench.router(network, "w", "pod-0")
        await first.ready()
        first.session.send(bench.submit(("x", 1, 4000)))
        await first.until(lambda: "x" in first.tokens)
        await first.close()
        second = bench.router(network, "w", "pod-0")
        await second.ready()
        assert engine.aborted == ["x"]
        second.session.send(bench.submit(("x", 70, 3)))
        await second.ended("x")
        assert second.tokens["x"] == [70, 71, 72]
        assert first.last == {}

    play(scenario)


async def tokens_until(connection: RouterConnection, request_id: str, count: int) -> list[int]:
    """Reads a raw connection until that many tokens came."""
    got: list[int] = []
    while len(got) < count:
        payload = (await connection.receive()).payload
        if isinstance(payload, StepBatch):
            got += [t for d in payload.deltas if d.request_id == request_id for t in d.token_ids]
    return got


def test_a_router_that_returns_before_its_break_was_noticed_takes_its_session_over(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        old = await network.dial("w", Hello(router_id="r"))
        await old.send(RouterFrame(1, 0, bench.submit(("x", 0, 300))))
        assert await tokens_until(old, "x", 3) == [0, 1, 2]
        # The old connection fills up, so that its writer waits in the middle of a send.
        await bench.clock.sleep(0.2)
        new = await network.dial("w", Hello("r", old.welcome.session_id, 0))
        assert new.welcome.resumed
        assert new.welcome.received_seq == 1
        assert await tokens_until(new, "x", 60) == list(range(60))
        with pytest.raises(ConnectionLost):
            await old.receive()
        assert host.sessions == 1
        await new.close()

    play(scenario)


def test_a_session_can_be_resumed_by_its_own_router_only(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        owner = await network.dial("w", Hello(router_id="owner"))
        await owner.send(RouterFrame(1, 0, bench.submit(("x", 0, 20))))
        thief = await network.dial("w", Hello("thief", owner.welcome.session_id, 0))
        assert not thief.welcome.resumed
        assert thief.welcome.session_id != owner.welcome.session_id
        assert await tokens_until(owner, "x", 20) == list(range(20))
        await owner.close()
        await thief.close()

    play(scenario)


def test_a_handoff_that_comes_after_its_session_has_ended_is_released(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        first = await network.dial("w", Hello(router_id="r"))
        await first.send(RouterFrame(1, 0, bench.submit(("p", 1, 1), leg=Leg.PREFILL)))
        await bench.clock.sleep(0)
        engine.abort_comes_too_late = True
        await first.close()
        second = await network.dial("w", Hello(router_id="r"))
        await bench.clock.sleep(0.1)
        assert engine.submitted == engine.aborted == ["p"]
        assert engine.released == ["lease-p"]
        assert host.live_requests == host.held_leases == 0
        await second.close()

    play(scenario)


def test_kv_that_is_offered_before_its_leg_ends_is_released_with_the_session(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host(SessionHostLimits(resume_window_s=1.0))
        engine.offers_early = True
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("p", 1, 1), leg=Leg.PREFILL))
        await router.until(lambda: "p" in router.tokens)
        assert (host.live_requests, host.held_leases) == (1, 1)
        await router.ended("p")
        assert (host.live_requests, host.held_leases) == (0, 1)
        network.unlisten("w")
        network.cut()
        await bench.clock.sleep(1.1)
        assert engine.released == ["lease-p"]
        assert host.held_leases == 0

    play(scenario)


def test_a_session_given_up_while_the_worker_answers_is_not_taken_up_again(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host(SessionHostLimits(resume_window_s=60.0))
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()

        async def answer_late(connection: WorkerConnection) -> None:
            await bench.clock.sleep(1.5)
            await host.serve(connection)

        network.listen("w", answer_late)
        network.cut()
        await router.until(lambda: SessionLost in kinds(router))
        network.listen("w", host.serve)
        await router.ready(2)
        assert kinds(router) == [SessionReady, SessionInterrupted, SessionLost, SessionReady]
        assert not router.told()[-1].resumed
        router.session.send(bench.submit(("a", 100, 6)))
        await router.ended("a")
        assert host.sessions == 1

    play(scenario)


def test_more_live_requests_than_allowed_are_refused_one_by_one(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host(SessionHostLimits(link=LINK, max_live_requests=2))
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(*WANTED))
        await router.ended("a", "b", "c")
        assert router.last["c"].error == WORKER_OVERLOADED
        assert router.tokens["a"] == TOKENS["a"]

    play(scenario)


def test_only_the_session_that_was_granted_a_lease_can_release_it(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        owner, other = bench.router(network, "w", "owner"), bench.router(network, "w", "other")
        await owner.ready()
        await other.ready()
        owner.session.send(bench.submit(("p", 1, 1), leg=Leg.PREFILL))
        await owner.ended("p")
        other.session.send(ReleaseLeases(("lease-p",)))
        await bench.clock.sleep(0.1)
        assert engine.released == []
        owner.session.send(ReleaseLeases(("lease-p",)))
        await bench.clock.sleep(0.1)
        assert engine.released == ["lease-p"]

    play(scenario)


def test_a_router_that_leaves_says_so_and_its_worker_is_quiet_at_once(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("a", 1, 1000)))
        await bench.clock.sleep(0.1)
        began = bench.clock.now()
        await router.close()
        assert bench.clock.now() - began < 0.5
        assert host.sessions == 0
        assert engine.aborted == ["a"]
        assert await host.drain("stop", grace_s=5.0)
        assert bench.clock.now() - began < 1.0

    play(scenario)


def test_an_idle_router_hears_of_the_load_that_others_make(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        busy, idle = bench.router(network, "w", "busy"), bench.router(network, "w", "idle")
        await busy.ready()
        await idle.ready()
        busy.session.send(bench.submit(("a", 1, 100)))
        await busy.ended("a")
        await bench.clock.sleep(0.5)
        messages = [e.message for e in idle.events if isinstance(e, SessionMessage)]
        assert messages == [StepBatch(load=EngineLoad(running=running)) for running in (0, 1, 0)]
        told = len(idle.events)
        await bench.clock.sleep(60)
        later = idle.events[told:]
        messages = [e.message for e in later if isinstance(e, SessionMessage)]
        assert all(message == StepBatch(load=EngineLoad()) for message in messages)
        assert len(messages) == len(later) == 30, "heartbeats without messages keep the session"

    play(scenario)


def test_large_submits_travel_in_parts_and_a_request_beyond_the_limit_is_refused(
    play: Play,
) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w", limits=SessionLimits(link=LINK, submit_bytes=700))
        await router.ready()
        router.session.send(bench.submit(*((str(n), n, 1) for n in range(5))))
        await router.ended(*map(str, range(5)))
        assert engine.submitted == [str(n) for n in range(5)]
        tiny = bench.router(network, "w", "tiny", SessionLimits(request_bytes=10))
        await tiny.ready()
        with pytest.raises(RequestError) as caught:
            tiny.session.send(bench.submit(("x", 1, 1)))
        assert caught.value.code == "request_too_large"

    play(scenario)


def test_images_that_a_worker_has_not_acknowledged_end_no_session(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, engine = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w", limits=SessionLimits(link=LINK))
        await router.ready()
        image = PromptMedia(0, 1, bytes(32), bytes(LINK.tail_bytes // 3))
        for n in range(8):
            (request,) = bench.submit((str(n), n, 1)).requests
            router.session.send(Submit((replace(request, media=(image,)),)))
        await router.ended(*map(str, range(8)))
        assert engine.submitted == [str(n) for n in range(8)]
        assert not any(isinstance(event, SessionLost) for event in router.events)

    play(scenario)


def test_nothing_is_told_after_close(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork) -> None:
        host, _ = await bench.host()
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("a", 1, 100)))
        await router.until(lambda: "a" in router.tokens)
        await router.close()
        told: list[SessionEvent] = list(router.events)
        await bench.clock.sleep(5)
        assert router.events == told
        assert host.sessions == 0
        assert all(not isinstance(e, SessionMessage) or isinstance(e.message, StepBatch) for e in told)

    play(scenario)
