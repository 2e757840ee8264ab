"""Fast-path deltas arrive over the link in order with others, and leave no state after their stream."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

import pytest
from tests.kit.gateway.edge_link import Linked, core_parts, linked
from tests.kit.gateway.scripted_router import ScriptedRouter, ScriptedStream

from kvasir.clock import MonotonicClock
from kvasir.core.messages import WorkerFrame
from kvasir.core.requests import Delta, Request, StepBatch
from kvasir.native import IS_NATIVE, Fan, StreamTokens
from kvasir.ports.router import Lane
from kvasir.wire.codec import encode_to_router
from kvasir_platform.sim.client import ClientStream

pytestmark = pytest.mark.skipif(not IS_NATIVE, reason="the twin opens no lane")

PATIENCE_S = 20.0


class Core:
    """What a router does for its streams, by hand."""

    def __init__(self) -> None:
        self.router = ScriptedRouter(MonotonicClock())
        self.fan = Fan()
        self.lanes: dict[str, Lane] = {}

    def open(self, stream: ScriptedStream) -> None:
        """Give the stream a lane where it is."""
        name = stream.request.request_id
        lane = stream.sink.lane(name)
        assert lane is not None
        self.lanes[name] = lane
        self.fan.add("w", f"leg-{name}", StreamTokens(stream.offsets.get(0, 0)), lane)

    def fast_path(self, *streams: ScriptedStream, text: str = "x") -> None:
        """One step, with the next token of each stream."""
        deltas = []
        for stream in streams:
            at = stream.offsets.get(0, 0)
            stream.offsets[0] = at + 1
            deltas.append(Delta(f"leg-{stream.request.request_id}", at, (at,), text))
        message = encode_to_router(WorkerFrame(1, 0, StepBatch(tuple(deltas))))
        assert self.fan.take("w", message, 1.0) == ([], False)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def begun(both: Linked, core: Core, *names: str) -> tuple[list[ClientStream], list[ScriptedStream]]:
    """Streams of which the edge has the first token, at both ends."""
    streams = [ClientStream(Request(name, "m", array("I", [1, 2]))) for name in names]
    for stream in streams:
        both.link.router.submit(stream.request, stream)
    await until(lambda: len(core.router.streams) == len(names))
    for scripted in core.router.streams:
        scripted.emit("a")
        core.open(scripted)
    return streams, core.router.streams


@pytest.mark.parametrize("fast_path", [True, False])
async def test_what_goes_either_way_arrives_in_order(fast_path: bool) -> None:
    core = Core()
    async with linked(core_parts(core.router), fast_path=fast_path) as both:
        (one, two), (first, second) = await begun(both, core, "one", "two")
        # All in one turn of the loop, in which the core says everything with as few frames as keep the order.
        core.fast_path(first, second, text="b")
        core.fast_path(first, text="c")
        first.emit("d")
        core.fast_path(second, text="c")
        core.open(first)
        core.fast_path(first, second, text="e ☃")
        first.emit(".")
        first.finish()
        second.emit(".")
        second.finish()
        async with asyncio.timeout(PATIENCE_S):
            await one.finished()
            await two.finished()
        assert one.texts == ["abcde ☃."]
        assert two.texts == ["abce ☃."]
        assert sum(len(frame.fast_path) for frame in both.frames) == 2


async def test_what_came_straight_for_a_stream_that_has_ended_reaches_nobody() -> None:
    core = Core()
    async with linked(core_parts(core.router)) as both:
        (one, two), (first, second) = await begun(both, core, "one", "two")
        await until(one.started.is_set)
        both.link.router.cancel("one")
        core.fast_path(first, second, text="b")
        second.finish()
        async with asyncio.timeout(PATIENCE_S):
            await two.finished()
        assert (one.texts, two.texts) == (["a"], ["ab"])
        await until(lambda: core.router.cancelled)
        assert first.sink.lane("one") is None, "the core knows it no more"


async def test_an_edge_that_does_not_read_what_goes_straight_loses_its_streams() -> None:
    core = Core()
    bound = 1 << 20
    async with linked(core_parts(core.router), max_waiting_bytes=bound) as both:
        (one,), (stream,) = await begun(both, core, "one")
        await until(one.started.is_set)
        both.hold()
        said = 0
        while not core.router.cancelled:
            core.fast_path(stream, text="x" * 60_000)
            said += 1
            await asyncio.sleep(0)
        assert said * 60_000 < bound + (4 << 20)
        both.hold(holding=False)
        async with asyncio.timeout(PATIENCE_S):
            await one.ended.wait()
        assert one.error is not None
        assert one.error.code == "edge_overloaded"
