"""The stream of events that answers with one choice share: order, lagging clients, ends and errors."""

from __future__ import annotations

import pytest
from tests.kit.gateway.api_answers import FIRST_TIMING, TIMING, RecordingWire, exchange_on, received

from kvasir.core.errors import CapacityError
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.event_stream import EventStream

BEFORE, AFTER = b"data: ", b"\n\n"


def begun(headers: dict[bytes, bytes] | None = None) -> tuple[EventStream, Exchange, RecordingWire]:
    wire = RecordingWire()
    exchange = exchange_on(wire, headers)
    stream = EventStream(exchange, lambda: FIRST_TIMING)
    stream.send(b"data: 0\n\n")
    return stream, exchange, wire


def lag(exchange: Exchange, *, lags: bool) -> None:
    notify = exchange.on_lagging if lags else exchange.on_caught_up
    assert notify is not None
    notify()


def test_the_headers_come_with_the_first_event() -> None:
    wire = RecordingWire()
    stream = EventStream(exchange_on(wire), lambda: FIRST_TIMING)
    assert not wire.sent
    assert not stream.begun
    stream.send(b"data: 0\n\n")
    stream.end(b"data: 1\n\n", TIMING)
    answer = received(wire.sent)
    assert answer.body == b"data: 0\n\ndata: 1\n\n"
    assert answer.headers["server-timing"] == "admit;dur=1.00"


def test_text_for_a_client_that_lags_is_joined_and_stays_before_what_follows() -> None:
    stream, exchange, wire = begun()
    lag(exchange, lags=True)
    writes = wire.writes
    stream.text(BEFORE, "a", AFTER)
    stream.text(BEFORE, "b", AFTER)
    stream.text(b"other: ", "c", AFTER)
    assert wire.writes == writes + 1
    stream.send(b"data: 1\n\n")
    stream.text(BEFORE, "d", AFTER)
    lag(exchange, lags=False)
    stream.text(BEFORE, "e", AFTER)
    stream.end(b"", b"")
    assert received(wire.sent).body.split(AFTER) == [
        b"data: 0",
        b'data: "ab"',
        b'other: "c"',
        b"data: 1",
        b'data: "d"',
        b'data: "e"',
        b"",
    ]


def test_held_text_is_bounded() -> None:
    stream, exchange, wire = begun()
    lag(exchange, lags=True)
    writes = wire.writes
    for _ in range(100):
        stream.text(BEFORE, "x" * 1000, AFTER)
    assert 3 < wire.writes - writes < 10


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({}, ("", "")),
        ({b"te": b"trailers"}, ("", "total;dur=2.00")),
        ({b"x-kvasir-server-timing": b"comment"}, (": server-timing: total;dur=2.00", "")),
    ],
)
def test_the_final_timing_follows_as_the_client_asked(
    headers: dict[bytes, bytes], shown: tuple[str, str]
) -> None:
    stream, _, wire = begun(headers)
    stream.end(b"data: 1\n\n", TIMING)
    answer = received(wire.sent)
    assert answer.trailers.get("server-timing", "") == shown[1]
    assert (shown[0] in answer.body.decode()) if shown[0] else (b": server" not in answer.body)


def test_an_error_is_a_response_before_the_stream_and_an_event_within_it() -> None:
    wire = RecordingWire()
    EventStream(exchange_on(wire), lambda: b"").fail(b"", CapacityError("full"))
    assert received(wire.sent).status == 503
    stream, exchange, wire = begun()
    lag(exchange, lags=True)
    stream.text(BEFORE, "held", AFTER)
    stream.fail(b"data: 1\n\n", CapacityError("lost"))
    body = received(wire.sent).body
    assert body.index(b'"held"') < body.index(b"data: 1") < body.index(b'"message":"lost"')
    assert wire.closed is True
