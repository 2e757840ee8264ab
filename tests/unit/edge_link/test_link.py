"""The link between an edge and its core if one side is gone, slow, or sends what the other cannot process."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.kit.gateway.edge_link import Linked, core_parts, linked
from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.core.errors import CapacityError
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import Request
from kvasir.native import StreamGaps
from kvasir.ports.limits import Grant, LimitRefusal, Quota
from kvasir.telemetry.reasons import REASONS
from kvasir_platform.edge import frames as frames_module
from kvasir_platform.edge.remote_limits import RemoteLimits
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits
from kvasir_platform.sim.client import ClientStream

PATIENCE_S = 20.0


def request(name: str, tokens: int = 4) -> Request:
    return Request(name, "kvasir-tiny", array("I", range(tokens)))


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until it is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


def submitted(both: Linked, name: str) -> ClientStream:
    stream = ClientStream(request(name))
    both.link.router.submit(stream.request, stream)
    return stream


async def test_images_come_to_the_core_as_the_edge_has_them() -> None:
    images = (PromptMedia(1, 2, bytes(32), b"\x89PNG" + bytes(300_000)), PromptMedia(3, 1, b"d" * 32, b"x"))
    router = ScriptedRouter(MonotonicClock())
    async with linked(core_parts(router)) as both:
        stream = ClientStream(replace(request("mine"), media=images))
        both.link.router.submit(stream.request, stream)
        await until(lambda: router.streams)
        assert router.streams[0].request.media == images
        router.streams[0].finish()
        await stream.finished()


async def test_an_edge_that_is_gone_frees_its_requests_and_no_other_edges() -> None:
    router = ScriptedRouter(MonotonicClock())
    core = core_parts(router)
    async with linked(core) as one, linked(core, name="edge-1") as other:
        submitted(one, "mine")
        theirs = submitted(other, "theirs")
        await until(lambda: len(router.streams) == 2)
        one.link.close()
        await until(lambda: one.heard.lost == 1)
        assert router.cancelled == ["mine"]
        stream = next(each for each in router.streams if each.request.request_id == "theirs")
        stream.emit("still here")
        stream.finish()
        await theirs.finished()


async def test_without_a_core_every_stream_ends_with_one_clean_error_and_nothing_more_is_taken() -> None:
    router = ScriptedRouter(MonotonicClock())
    lost: list[bool] = []
    async with linked(core_parts(router)) as both:
        both.link.on_lost = lambda: lost.append(all(stream.ended.is_set() for stream in streams))
        streams = [submitted(both, f"r{i}") for i in range(3)]
        (await router.submitted(3)).emit("begun")
        await until(streams[2].started.is_set)
        both.end.abort()
        await until(lambda: bool(lost))
        assert lost == [True]
        assert [stream.error.code for stream in streams if stream.error] == ["router_lost"] * 3
        with pytest.raises(CapacityError) as refused:
            submitted(both, "late")
        assert refused.value.code == "router_lost"
        assert both.link.router.not_ready_reason() == "the router has ended"
        assert both.link.router.in_flight == 0


async def test_an_edge_that_does_not_read_loses_its_streams_and_holds_up_nobody() -> None:
    router = ScriptedRouter(MonotonicClock())
    core = core_parts(router)
    bound = 1 << 20
    async with linked(core, max_waiting_bytes=bound) as slow, linked(core, name="edge-1") as quick:
        mine, theirs = submitted(slow, "slow"), submitted(quick, "quick")
        await until(lambda: len(router.streams) == 2)
        streams = {stream.request.request_id: stream for stream in router.streams}
        slow.hold()
        said = 0
        async with asyncio.timeout(PATIENCE_S):
            while not router.cancelled:
                streams["slow"].emit("x" * 60_000)
                streams["quick"].emit("y")
                said += 1
                await asyncio.sleep(0)
        assert router.cancelled == ["slow"]
        # What the kernel holds of a socket is beyond the bound.
        assert said * 60_000 < bound + (4 << 20)
        streams["quick"].finish()
        await theirs.finished()
        assert len(theirs.tokens[0]) == said
        slow.hold(holding=False)
        async with asyncio.timeout(PATIENCE_S):
            await mine.ended.wait()
        assert mine.error is not None
        assert mine.error.code == "edge_overloaded"
        again = submitted(slow, "again")
        await until(lambda: len(router.streams) == 3)
        router.streams[-1].finish()
        await again.finished()


async def test_what_is_too_large_for_a_frame_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames_module, "MAX_FRAME_BYTES", 20_000)
    router = ScriptedRouter(MonotonicClock())
    async with linked(core_parts(router)) as both:
        large = ClientStream(request("large", 10_000))
        both.link.router.submit(large.request, large)
        small, other = submitted(both, "small"), submitted(both, "other")
        async with asyncio.timeout(PATIENCE_S):
            await large.ended.wait()
            await router.submitted(2)
        assert large.error is not None
        assert large.error.code == "request_too_large"
        streams = {stream.request.request_id: stream for stream in router.streams}
        assert set(streams) == {"small", "other"}
        streams["small"].emit("z" * 30_000)
        streams["other"].emit("fine")
        streams["other"].finish()
        async with asyncio.timeout(PATIENCE_S):
            await other.finished()
            await small.ended.wait()
        assert small.error is not None
        assert small.error.code == "edge_overloaded"
        assert router.cancelled == ["small"]


async def test_what_the_router_refuses_or_ends_is_not_counted_as_in_flight() -> None:
    router = ScriptedRouter(MonotonicClock())
    async with linked(core_parts(router)) as both:
        streams = [submitted(both, f"r{i}") for i in range(3)]
        await router.submitted(3)
        assert both.end.in_flight == both.link.router.in_flight == 3
        router.streams[0].finish()
        both.link.router.cancel("r1")
        router.refusal = CapacityError("It is full.")
        streams.append(submitted(both, "refused"))
        async with asyncio.timeout(PATIENCE_S):
            await streams[0].ended.wait()
            await streams[3].ended.wait()
        assert both.end.in_flight == both.link.router.in_flight == 1


async def test_bytes_that_are_no_frame_end_the_link() -> None:
    router = ScriptedRouter(MonotonicClock())
    async with linked(core_parts(router)) as both:
        submitted(both, "r")
        await router.submitted()
        both.say_raw(b"\xff\xff\xff\xff and more")
        await until(lambda: both.heard.lost == 1 and both.link.lost)
        assert router.cancelled == ["r"]


async def test_one_turn_of_the_loop_is_one_frame() -> None:
    router = ScriptedRouter(MonotonicClock())
    async with linked(core_parts(router)) as both:
        streams = [submitted(both, f"r{i}") for i in range(64)]
        await router.submitted(64)
        before = len(both.frames)
        for stream in router.streams:
            stream.emit("one")
        await until(lambda: all(stream.started.is_set() for stream in streams))
        assert len(both.frames) - before == 1


# -- rate limits


def taken(limits: RemoteLimits, tokens: int, quota: Quota) -> list[Grant | LimitRefusal]:
    verdicts: list[Grant | LimitRefusal] = []
    limits.take("acme", quota, tokens, verdicts.append)
    return verdicts


async def test_a_tenants_limits_are_counted_once_for_all_edges() -> None:
    memory = MemoryLimits(MonotonicClock().now)
    core = core_parts(ScriptedRouter(MonotonicClock()), memory)
    quota = Quota(concurrency=2)
    async with linked(core) as one, linked(core, name="edge-1") as other:
        first, second = taken(one.link.limits, 1, quota), taken(other.link.limits, 1, quota)
        await until(lambda: bool(first and second))
        third = taken(one.link.limits, 1, quota)
        await until(lambda: bool(third))
        assert isinstance(first[0], Grant)
        assert isinstance(second[0], Grant)
        assert isinstance(third[0], LimitRefusal)
        assert third[0].limit == "concurrency"
        one.link.limits.settle(first[0], 1)
        await until(lambda: memory.running("acme") == 1)
        fourth = taken(other.link.limits, 1, quota)
        await until(lambda: bool(fourth))
        assert isinstance(fourth[0], Grant)


async def test_what_a_request_did_not_use_is_given_back_through_the_link() -> None:
    core = core_parts(ScriptedRouter(MonotonicClock()))
    quota = Quota(tokens_per_min=100)
    async with linked(core) as both:
        limits = both.link.limits
        for end in (lambda grant: limits.settle(grant, 0), limits.release):
            granted = taken(limits, 100, quota)
            await until(granted.__len__)
            assert isinstance(granted[0], Grant)
            end(granted[0])
        with pytest.raises(ValueError, match="exceed the limit"):
            taken(limits, 101, quota)


async def test_grants_of_an_edge_that_is_gone_stay_charged_and_run_no_more() -> None:
    memory = MemoryLimits(MonotonicClock().now)
    core = core_parts(ScriptedRouter(MonotonicClock()), memory)
    quota = Quota(tokens_per_min=100, concurrency=5)
    async with linked(core) as both:
        granted = taken(both.link.limits, 90, quota)
        await until(lambda: bool(granted))
        both.link.close()
        await until(lambda: both.heard.lost == 1)
        assert memory.running("acme") == 0
        assert isinstance(memory.decide("acme", quota, 90), LimitRefusal)
        assert isinstance(taken(both.link.limits, 1, quota)[0], Grant), "without a core nobody is refused"


# -- pages and names


class Client:
    """A Wire that keeps what is written."""

    lagging = False

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> None:
        """Takes the ordinary way."""

    def answered(self, *, close: bool) -> None:
        """The answer is complete."""

    def date(self) -> bytes:
        return b""

    def heard(self) -> bool:
        return bool(self.written)


def asked(path: str) -> tuple[Exchange, Client]:
    wire = Client()
    return Exchange(HttpRequest("GET", path, {}, b"", keep_alive=True, chunked=True), "id", 0.0, wire), wire


async def test_a_page_of_the_core_is_answered_by_the_edge_that_was_asked() -> None:
    async with linked(core_parts(ScriptedRouter(MonotonicClock()))) as both:
        exchange, wire = asked("/status")
        both.link.pages.show(exchange)
        lost, lost_wire = asked("/decisions/x")
        both.link.pages.show(lost)
        lost.gone("client_closed")
        await until(lambda: bool(wire.written))
        assert wire.written.startswith(b"HTTP/1.1 200")
        assert wire.written.endswith(b"/status")
        assert not lost_wire.written
        unknown, wire = asked("/nowhere")
        both.link.pages.show(unknown)
        await until(lambda: bool(wire.written))
        assert wire.written.startswith(b"HTTP/1.1 404")


async def test_the_metrics_of_all_edges_are_one_page_and_stay_counted_when_an_edge_has_ended() -> None:
    core = core_parts(
        ScriptedRouter(MonotonicClock()),
        own=lambda: (
            b"# HELP a_total A.\n# TYPE a_total counter\na_total 1.0\n",
            b"# HELP b_total B.\n# TYPE b_total counter\nb_total 7.0\n",
        ),
    )
    async with linked(core) as one, linked(core, name="edge-1") as other:
        for both, count in ((one, 10), (other, 100)):
            text = f"# HELP a_total A.\n# TYPE a_total counter\na_total {count}.0\n"
            text += f"# HELP now N.\n# TYPE now gauge\nnow {count}.0\n"
            both.link.figures = text.encode
        for expected in (b"a_total 111.0\n", b"now 110.0\n"):
            exchange, wire = asked("/metrics")
            one.link.pages.show(exchange)
            await until(wire.heard)
            assert expected in wire.written
            assert b"b_total 7.0\n" in wire.written
        other.link.close()
        await until(lambda: other.heard.lost == 1)
        exchange, wire = asked("/metrics")
        one.link.pages.show(exchange)
        await until(lambda: bool(wire.written))
        assert b"a_total 111.0\n" in wire.written
        assert b"now 10.0\n" in wire.written


async def test_names_of_calls_are_known_to_the_core() -> None:
    core = core_parts(ScriptedRouter(MonotonicClock()))
    async with linked(core) as both:
        both.link.names.note("client's", ("r-1", "r-2"))
        await until(lambda: core.names.find("client's") == ("r-1", "r-2"))


async def test_an_edge_says_where_it_listens_or_why_it_does_not() -> None:
    async with linked(core_parts(ScriptedRouter(MonotonicClock()))) as both:
        both.link.started("127.0.0.1", 80)
        both.link.failed(frames_module.note_of(CapacityError("no", code="queue_full")))
        await until(lambda: bool(both.heard.failed))
        assert both.heard.started == [("127.0.0.1", 80)]
        assert both.heard.failed[0].code == "queue_full"
        both.end.beat(7)
        assert both.end.unheard == 1
        await until(lambda: both.end.unheard == 0)


def test_what_the_link_says_to_clients_is_in_the_vocabulary() -> None:
    assert {"router_lost", "edge_overloaded", "no_capacity", "request_too_large"} <= set(REASONS)
