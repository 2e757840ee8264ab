"""A response that partly takes the fast path equals one that does not, and ends cleanly."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.kit.clocks import StillClock
from tests.kit.gateway.api_answers import FIRST_TIMING, TIMING, RecordingWire, ids
from tests.kit.gateway.scripted_router import ScriptedRouter
from tests.kit.lanes import socket_lane, stream_gaps

from kvasir.clock import MonotonicClock
from kvasir.core.errors import UpstreamError
from kvasir.core.messages import EncodedStep, WorkerFrame
from kvasir.core.requests import Delta, FinishReason, Request, Sampling, StepBatch, Usage
from kvasir.native import IS_NATIVE, Fan, Lane, StreamGaps, StreamTokens
from kvasir.ports.clock import Clock
from kvasir.telemetry.families.updated import Histogram
from kvasir.telemetry.metrics import Metrics
from kvasir.wire.codec import decode_to_router, encode_to_router
from kvasir_platform.gateway.anthropic.message_format import MESSAGES_FORMAT
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.openai.answer import Answer, AnswerHead, Prompt
from kvasir_platform.gateway.openai.answer_formats import CHAT, COMPLETION, AnswerFormat
from kvasir_platform.gateway.serving.generation import Generation, PromptStream
from kvasir_router.fast_path import FastPath

pytestmark = pytest.mark.skipif(not IS_NATIVE, reason="the twin opens no lane")

USAGE = Usage(prompt_tokens=3, output_tokens=4)
TEXTS = ["Once", ' "upon"\n', " a ☃ \\ time", "\u0007."]


@dataclass
class SocketWire:
    """A client on a socket, which everything is written to at once."""

    ends: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    lagging: bool = False
    waiting: int = 0

    def write(self, data: bytes) -> None:
        self.ends[0].sendall(data)

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> Lane:
        return socket_lane(
            self.ends[0].fileno(),
            gaps,
            pending=lambda: self.waiting,
            write=self.write,
            before=before,
            after=after,
            chunked=chunked,
        )

    def answered(self, *, close: bool) -> None:
        """The answer is complete."""

    def date(self) -> bytes:
        return b""

    def read(self) -> bytes:
        self.ends[1].setblocking(False)
        try:
            return self.ends[1].recv(1 << 20)
        except BlockingIOError:
            return b""


@pytest.fixture
def wire() -> Iterator[SocketWire]:
    made = SocketWire()
    yield made
    for end in made.ends:
        end.close()


def answer_on(
    wire: SocketWire | RecordingWire, *, form: AnswerFormat = CHAT, chunked: bool = True
) -> tuple[Exchange, Answer]:
    exchange = Exchange(HttpRequest("POST", "/", {}, b"", keep_alive=True, chunked=chunked), "r", 0.0, wire)
    head = AnswerHead("id", 7, "model", 1, include_usage=True, prompts=(Prompt(ids(1, 2, 3)),))
    return exchange, form.streamed(exchange, head, lambda: FIRST_TIMING)


def frame(offset: int, text: str) -> bytes:
    return encode_to_router(WorkerFrame(1, 0, StepBatch((Delta("leg", offset, (offset,), text),))))


@pytest.mark.parametrize("form", [CHAT, COMPLETION, MESSAGES_FORMAT], ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("chunked", [True, False])
def test_the_client_reads_the_same_either_way(wire: SocketWire, form: AnswerFormat, chunked: bool) -> None:
    recorded = RecordingWire()
    _, ordinary = answer_on(recorded, form=form, chunked=chunked)
    _, fast_path = answer_on(wire, form=form, chunked=chunked)
    fan, gaps = Fan(), stream_gaps(Histogram((1.0,)))
    for at, text in enumerate(TEXTS):
        ordinary.delta(0, Delta("r", at, (at,), text))
    fast_path.delta(0, Delta("r", 0, (0,), TEXTS[0]))
    lane = fast_path.lane(0, gaps)
    assert lane is not None
    fan.add("w", "leg", StreamTokens(1), lane)
    for at, text in enumerate(TEXTS[1:], 1):
        assert fan.take("w", frame(at, text), 1.0)[0] == []
    for answer in (ordinary, fast_path):
        answer.delta(0, Delta("r", 4, (), "", finish=FinishReason.STOP, last=True))
        answer.finish(USAGE, TIMING)
    assert wire.read() == recorded.sent


def test_before_its_headers_and_while_its_client_lags_an_answer_has_no_lane(wire: SocketWire) -> None:
    (exchange, answer), gaps = answer_on(wire), stream_gaps(Histogram((1.0,)))
    assert answer.lane(0, gaps) is None
    answer.delta(0, Delta("r", 0, (0,), "Once"))
    assert exchange.on_lagging is not None
    assert exchange.on_caught_up is not None
    exchange.on_lagging()
    assert answer.lane(0, gaps) is None
    exchange.on_caught_up()
    assert answer.lane(0, gaps) is not None


@pytest.mark.parametrize("end", ["finish", "fail", "gone"])
def test_when_an_answer_has_ended_nothing_goes_past_it(wire: SocketWire, end: str) -> None:
    exchange, answer = answer_on(wire)
    answer.delta(0, Delta("r", 0, (0,), "Once"))
    fan = Fan()
    lane = answer.lane(0, stream_gaps(Histogram((1.0,))))
    assert lane is not None
    fan.add("w", "leg", StreamTokens(1), lane)
    if end == "finish":
        answer.finish(USAGE, TIMING)
    elif end == "fail":
        answer.fail(UpstreamError("lost", code="worker_lost"))
    else:
        exchange.gone("client_closed")
    wire.read()
    assert (fan.take("w", frame(1, "late"), 1.0)[0], wire.read()) == (None, b"")


class Call:
    """A call of one prompt that streams to `wire`."""

    def __init__(self, wire: SocketWire, *, n: int = 1, clock: Clock | None = None) -> None:
        self.exchange, answer = answer_on(wire)
        self.clock = clock or MonotonicClock()
        self.metrics = Metrics(CollectorRegistry(), ["m"])
        self.ended: list[Usage] = []
        router = ScriptedRouter(self.clock)
        generation = Generation(
            self.exchange,
            answer,
            router=router,
            metrics=self.metrics,
            spans=None,
            clock=self.clock,
            on_end=lambda call: self.ended.append(call.usage),
        )
        generation.start([Request("r", "m", ids(1, 2, 3), Sampling(n=n))])
        self.sink = router.streams[0].sink

    @property
    def tokens(self) -> int:
        """Tokens that the call counts for its client so far."""
        assert isinstance(self.sink, PromptStream)
        return self.sink.tokens


def test_tokens_that_went_past_the_gateway_are_charged_and_measured(wire: SocketWire) -> None:
    call, fan = Call(wire), Fan()
    assert call.sink.lane("r") is None, "nothing has come yet"
    call.sink.on_delta(Delta("r", 0, (0,), TEXTS[0]))
    lane = call.sink.lane("r")
    assert lane is not None
    fan.add("w", "leg", StreamTokens(1), lane)
    fan.take("w", frame(1, TEXTS[1]), call.clock.now())
    fan.take("w", frame(2, TEXTS[2]), call.clock.now())
    assert (call.tokens, lane.open) == (3, True), "reading does not close the lane"
    call.sink.on_delta(Delta("r", 3, (3,), TEXTS[3]))
    call.exchange.gone("client_closed")
    assert call.ended == [Usage(prompt_tokens=3, output_tokens=4)]
    assert 'inter_token_latency_seconds_count{model="m"} 3.0' in call.metrics.render().decode()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=4), st.booleans()), max_size=12))
def test_the_fast_path_changes_neither_what_is_sent_nor_what_is_counted(
    steps: list[tuple[int, str, bool]],
) -> None:
    seen = []
    for fast in (True, False):
        wire = SocketWire()
        try:
            call = Call(wire, clock=(clock := StillClock(10.0)))
            tokens = StreamTokens()
            path = FastPath(lambda _, delta: ("w", "r", StreamTokens(delta.offset + len(delta.token_ids))))
            call.sink.on_delta(Delta("r", 0, (0,), TEXTS[0]))
            tokens.add((0,), 0)
            for count, text, plain in steps:
                clock.at += 0.01
                ids = range(count)
                usage = None if plain else Usage(prompt_tokens=3)
                step = StepBatch((Delta("r", tokens.count, tuple(ids), text, usage=usage),))
                tokens.add(ids, 0)
                frame = decode_to_router(encode_to_router(WorkerFrame(1, 0, step)))
                assert isinstance(frame, WorkerFrame)
                assert isinstance(frame.payload, EncodedStep)
                rest = path.rest("w", frame.payload, clock.now()) if fast else frame.payload.decode(None)
                for delta in () if rest is None else rest.deltas:
                    call.sink.on_delta(delta)
                    if fast:
                        path.offer("r", delta, call.sink)
                assert call.tokens == tokens.count
            shown = call.metrics.render()
            call.exchange.gone("client_closed")
            seen.append((wire.read(), shown, call.ended))
        finally:
            for end in wire.ends:
                end.close()
    assert seen[0] == seen[1]


def test_a_call_with_several_choices_has_no_lane(wire: SocketWire) -> None:
    call = Call(wire, n=2)
    call.sink.on_delta(Delta("r", 0, (0,), TEXTS[0]))
    assert call.sink.lane("r") is None
