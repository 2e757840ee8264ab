"""Contract of routers for gateways: in the same process, and behind a link."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.gateway.edge_link import core_parts, linked
from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.requests import (
    Constraint,
    Delta,
    FinishReason,
    OutputParsing,
    Request,
    Sampling,
    SloClass,
    StructuredOutput,
    Task,
    ToolCallDelta,
)
from kvasir.ports.router import BrownoutView, RequestPort, RequestSummary, RouterPort
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import small_deployment

KINDS = ("in process", "over a link")
PATIENCE_S = 20.0


@dataclass
class Side:
    """The port under test, and the router that is behind it."""

    port: RequestPort
    router: Any


Behind = Callable[[RouterPort], Any]


@pytest_asyncio.fixture(params=KINDS)
async def behind(request: pytest.FixtureRequest) -> AsyncIterator[Behind]:
    """Makes the port of a router: itself, or what an edge has of it."""
    async with AsyncExitStack() as stack:

        async def make(router: RouterPort) -> RequestPort:
            if request.param == "in process":
                return router
            both = await stack.enter_async_context(linked(core_parts(router)))
            return both.link.router

        yield make


@pytest_asyncio.fixture
async def scripted(behind: Behind) -> Side:
    """In front of a router that does as it is told."""
    router = ScriptedRouter(MonotonicClock())
    return Side(await behind(router), router)


@pytest_asyncio.fixture
async def production(behind: Behind) -> AsyncIterator[tuple[RequestPort, Cluster]]:
    """In front of the production router, with simulated engines."""
    cluster = Cluster(small_deployment(), MonotonicClock())
    await cluster.start()
    yield await behind(cluster.router), cluster
    await cluster.close()


def request(name: str, tokens: int = 100, **rest: Any) -> Request:
    sampling = rest.pop("sampling", Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    return Request(name, "kvasir-tiny", array("I", range(tokens)), sampling, **rest)


async def refusal(port: RequestPort, asked: Request) -> tuple[KvasirError, RequestSummary | None]:
    """How a request is refused: at once, or by its sink in a summary that says so."""
    stream = ClientStream(asked)
    try:
        port.submit(asked, stream)
    except KvasirError as error:
        assert not stream.ended.is_set()
        return error, None
    async with asyncio.timeout(PATIENCE_S):
        await stream.ended.wait()
    assert stream.error is not None
    assert not stream.started.is_set()
    return stream.error, stream.summary


async def test_every_request_ends_once_with_all_its_tokens_in_order(
    production: tuple[RequestPort, Cluster],
) -> None:
    port, cluster = production
    rng = Random(1)
    streams = []
    for i in range(40):
        asked = request(f"r{i}", rng.randrange(1, 200), arrival_s=cluster.clock.now())
        streams.append(ClientStream(asked))
        port.submit(asked, streams[-1])
    async with asyncio.timeout(PATIENCE_S):
        for stream in streams:
            summary = await stream.finished()
            assert summary.request_id == stream.request.request_id
            assert summary.outcome == "ok"
            assert summary.usage.output_tokens == len(stream.tokens[0]) == 8
            assert summary.usage.prompt_tokens == len(stream.request.tokens)
            assert summary.ttft_s is not None
            assert 0 < summary.ttft_s < PATIENCE_S
            assert not stream.broken
        await cluster.rest(PATIENCE_S)


async def test_nothing_comes_after_a_cancel_and_every_worker_is_free_again(
    production: tuple[RequestPort, Cluster],
) -> None:
    port, cluster = production
    long = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
    streams = [ClientStream(request(f"r{i}", sampling=long)) for i in range(8)]
    for stream in streams:
        port.submit(stream.request, stream)
    async with asyncio.timeout(PATIENCE_S):
        await streams[0].started.wait()
        for stream in streams:
            port.cancel(stream.request.request_id)
        had = [len(stream.tokens[0]) for stream in streams]
        await cluster.rest(PATIENCE_S)
    assert [len(stream.tokens[0]) for stream in streams] == had
    assert not any(stream.ended.is_set() for stream in streams)


async def test_what_is_on_its_way_when_a_request_is_cancelled_does_not_reach_its_sink(scripted: Side) -> None:
    stream, other = ClientStream(request("r")), ClientStream(request("other"))
    for each in (stream, other):
        scripted.port.submit(each.request, each)
    async with asyncio.timeout(PATIENCE_S):
        await scripted.router.submitted(2)
        answer, barrier = scripted.router.streams
        answer.emit("late")
        had = list(stream.texts)
        scripted.port.cancel("r")
        assert await scripted.router.cancels() == ["r"]
        answer.finish()
        barrier.finish()
        await other.finished()
    assert stream.texts == had
    assert not stream.ended.is_set()


async def test_a_request_that_is_cancelled_in_the_turn_in_which_it_was_submitted_is_never_heard_of(
    production: tuple[RequestPort, Cluster],
) -> None:
    port, cluster = production
    stream, other = ClientStream(request("a")), ClientStream(request("b"))
    port.submit(stream.request, stream)
    port.cancel("a")
    port.submit(other.request, other)
    async with asyncio.timeout(PATIENCE_S):
        await other.finished()
        await cluster.rest(PATIENCE_S)
    assert not stream.started.is_set()
    assert not stream.ended.is_set()


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("It is full.", code="queue_full", retry_after_s=7.25),
        RequestError("No such thing.", status=404, code="model_not_found", param="model"),
        UpstreamError("A worker failed."),
        KvasirError("Something else."),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("when", ["at the door", "before the first token", "in its middle"])
async def test_an_error_arrives_as_it_was_raised(scripted: Side, error: KvasirError, when: str) -> None:
    asked = request("r", arrival_s=3.0, trace_context="00-aa-bb-01", slo=SloClass("fast", 0.5, 0.05))
    if when == "at the door":
        scripted.router.refusal = error
        got, summary = await refusal(scripted.port, asked)
        assert summary is None or summary.refused
    else:
        stream = ClientStream(asked)
        scripted.port.submit(asked, stream)
        async with asyncio.timeout(PATIENCE_S):
            answer = await scripted.router.submitted()
            if when == "in its middle":
                answer.emit("some")
            answer.fail(error)
            await stream.ended.wait()
        assert stream.error is not None
        got, summary = stream.error, stream.summary
        assert summary is not None
        assert not summary.refused
        assert stream.texts == (["some"] if when == "in its middle" else [""])
    assert said(got) == said(error)
    if summary is not None:
        assert (summary.outcome, summary.arrival_s, summary.slo) == (error.code, 3.0, asked.slo)
        assert summary.trace_context == "00-aa-bb-01"


async def test_a_request_comes_to_the_router_as_it_was_sent(scripted: Side) -> None:
    asked = Request(
        "r",
        "kvasir-tiny",
        array("I", [0, 5, (1 << 32) - 1]),
        Sampling(
            max_tokens=9,
            n=3,
            stop=("a", "b"),
            logit_bias=((7, -1.5),),
            structured=StructuredOutput(Constraint.REGEX, "x+"),
        ),
        adapter="pirate",
        salt="salt",
        arrival_s=1.5,
        deadline_s=9.5,
        priority=3,
        block_hashes=array("Q", [(1 << 64) - 1, 4]),
        session="s",
        task=Task.GENERATE,
        parsing=OutputParsing(tools="[]", tool_choice="auto"),
        tenant="acme",
    )
    scripted.port.submit(asked, ClientStream(asked))
    async with asyncio.timeout(PATIENCE_S):
        seen = (await scripted.router.submitted()).request
    assert isinstance(seen, Request)
    assert fields(seen) == fields(asked)


async def test_a_delta_comes_to_the_sink_as_it_was_sent(scripted: Side) -> None:
    asked = request("r")
    heard: list[Delta] = []
    stream = ClientStream(asked, lambda what: heard.append(what) if isinstance(what, Delta) else None)
    sent = Delta(
        "r",
        0,
        (1, 2),
        "text",
        finish=FinishReason.STOP,
        stop_reason="7",
        last=True,
        reasoning="why",
        tool_calls=(ToolCallDelta(0, "id", "name", "{}"),),
        raw_length=4,
        reasoning_tokens=1,
        embedding=array("f", [1.0, -0.5]),
    )
    scripted.port.submit(asked, stream)
    async with asyncio.timeout(PATIENCE_S):
        answer = await scripted.router.submitted()
        answer.sink.on_delta(sent)
        answer.finish()
        await stream.finished()
    assert [fields(delta) for delta in heard] == [fields(sent)]


async def test_a_sink_that_fails_loses_its_own_stream_only(production: tuple[RequestPort, Cluster]) -> None:
    port, cluster = production

    def fail(_: object) -> None:
        raise ZeroDivisionError

    bad, good = ClientStream(request("bad"), fail), ClientStream(request("good"))
    port.submit(bad.request, bad)
    port.submit(good.request, good)
    async with asyncio.timeout(PATIENCE_S):
        assert (await good.finished()).outcome == "ok"
        await cluster.rest(PATIENCE_S)
    assert not bad.ended.is_set()


async def test_cancelling_what_is_not_known_does_nothing(scripted: Side) -> None:
    asked = request("r")
    stream = ClientStream(asked)
    scripted.port.cancel("never")
    scripted.port.submit(asked, stream)
    async with asyncio.timeout(PATIENCE_S):
        (await scripted.router.submitted()).finish()
        await stream.finished()
    scripted.port.cancel("r")
    assert not stream.broken


async def test_a_name_that_is_in_use_is_refused(production: tuple[RequestPort, Cluster]) -> None:
    port, _ = production
    first = ClientStream(request("r"))
    port.submit(first.request, first)
    error, _ = await refusal(port, request("r"))
    assert error.code == "duplicate_request"
    async with asyncio.timeout(PATIENCE_S):
        await first.finished()


async def test_readiness_and_pressure_are_told(behind: Behind) -> None:
    router = ScriptedRouter(MonotonicClock())
    router.reason = "no worker"
    router.reasons = {"kvasir-tiny": "no worker", "other": None}
    router.browned_out = BrownoutView(2, "2; shed=2", "small")
    port = await behind(router)
    asked = request("r")
    async with asyncio.timeout(PATIENCE_S):
        stream = ClientStream(asked)
        port.submit(asked, stream)
        (await router.submitted()).finish()
        await stream.finished()
    assert port.not_ready_reason() == port.refusing_reason() == "no worker"
    assert port.not_ready_models() == {"kvasir-tiny": "no worker", "other": None}
    assert port.brownout("kvasir-tiny") == router.browned_out


def said(error: KvasirError) -> list[object]:
    """All that a client can see of an error."""
    names = ("message", "code", "status", "param", "retry_after_s")
    return [type(error), str(error), *(getattr(error, name, None) for name in names)]


def fields(value: Request | Delta) -> dict[str, Any]:
    """What a value says, whatever its class."""
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}
