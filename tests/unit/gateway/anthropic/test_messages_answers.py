"""Messages, streamed and whole: the order of events, and that both say the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.kit.gateway.api_answers import FIRST_TIMING, TIMING, RecordingWire, exchange_on, received

from kvasir.core.errors import UpstreamError
from kvasir.core.requests import Delta, FinishReason, OutputParsing, ToolCallDelta, Usage
from kvasir_platform.gateway.anthropic.answers import MessageAnswer
from kvasir_platform.gateway.anthropic.errors import ANTHROPIC_ERRORS
from kvasir_platform.gateway.anthropic.message_format import MESSAGES_FORMAT
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.openai.answer import AnswerHead

AUTO = OutputParsing(tools="[]", tool_choice="auto")
USAGE = Usage(prompt_tokens=9, cached_tokens=4, output_tokens=5)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@dataclass
class Event:
    """One event of a stream."""

    name: str
    data: Any


def head(**changes: Any) -> AnswerHead:
    return AnswerHead(
        **{"id": "msg_1", "created": 1, "model": "m", "choices": 1, "prompt_tokens": 9, **changes}
    )


def delta(text: str = "", **changes: Any) -> Delta:
    return Delta("r", 0, (1,), text, **changes)


def end(finish: FinishReason = FinishReason.STOP, text: str = "", **changes: Any) -> Delta:
    return delta(text, finish=finish, last=True, **changes)


def call(index: int, arguments: str, call_id: str = "", name: str = "") -> Delta:
    return delta(tool_calls=(ToolCallDelta(index, call_id, name, arguments),))


def events_of(body: bytes) -> list[Event]:
    made = []
    for part in body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        made.append(Event(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return made


def streamed(shown: AnswerHead, said: list[Delta], usage: Usage = USAGE) -> list[Event]:
    wire = RecordingWire()
    answer = MESSAGES_FORMAT.streamed(exchange_on(wire), shown, lambda: FIRST_TIMING)
    for each in said:
        answer.delta(0, each)
    answer.finish(usage, TIMING)
    return events_of(received(wire.sent).body)


def whole(shown: AnswerHead, said: list[Delta], usage: Usage = USAGE) -> dict[str, Any]:
    wire = RecordingWire()
    answer = MESSAGES_FORMAT.whole(exchange_on(wire), shown)
    for each in said:
        answer.delta(0, each)
    answer.finish(usage, TIMING)
    made: dict[str, Any] = received(wire.sent).json
    return made


def put_together(events: list[Event]) -> dict[str, Any]:
    """The message that Anthropic's client makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        if event.name == "ping":
            continue
        typed = EVENT.validate_python(event.data)
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    made: dict[str, Any] = json.loads(snapshot.to_json(exclude_unset=True))
    # Of refusals only; the client sets it, whether or not an event has it.
    assert made.pop("stop_details") is None
    return made


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


def test_text_is_one_block_between_start_and_stop() -> None:
    events = streamed(head(), [delta("Hel"), delta("lo"), delta(), end()])
    assert names(events) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(event.data["type"] == event.name for event in events)
    started = events[0].data["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["input_tokens"]) == ([], None, 9)
    assert events[2].data == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert [event.data["delta"]["text"] for event in events[3:5]] == ["Hel", "lo"]
    assert events[6].data["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[6].data["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
    }


def test_tokens_from_the_cache_are_known_at_the_start_if_the_engine_says_so() -> None:
    events = streamed(head(), [delta("a", usage=Usage(prompt_tokens=9, cached_tokens=4)), end()])
    assert events[0].data["message"]["usage"]["cache_read_input_tokens"] == 4
    assert events[0].data["message"]["usage"]["input_tokens"] == 5


def test_thinking_text_and_calls_are_blocks_one_after_another() -> None:
    said = [
        delta(reasoning="Hm."),
        delta("Let me see."),
        call(0, "", "call_a", "weather"),
        call(0, '{"city":'),
        call(0, '"Oslo"}'),
        delta("\n"),
        call(1, "{}", "call_b", "tides"),
        end(reasoning_tokens=2),
    ]
    events = streamed(head(parsing=AUTO), said)
    opened = [
        (event.data["index"], event.data["content_block"])
        for event in events
        if event.name == "content_block_start"
    ]
    assert opened == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (1, {"type": "text", "text": ""}),
        (2, {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}),
        (3, {"type": "tool_use", "id": "call_b", "name": "tides", "input": {}}),
        (4, {"type": "text", "text": ""}),
    ]
    pieces = [event.data for event in events if event.name == "content_block_delta"]
    assert [(each["index"], each["delta"]["type"]) for each in pieces] == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
        (4, "text_delta"),
    ]
    assert events[-2].data["delta"]["stop_reason"] == "tool_use"
    assert events[-2].data["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    assert put_together(events)["content"] == whole(head(parsing=AUTO), said)["content"]


@pytest.mark.parametrize(
    ("changes", "said", "reason", "sequence"),
    [
        ({}, end(), "end_turn", None),
        ({}, end(FinishReason.LENGTH), "max_tokens", None),
        ({"context_bound": True}, end(FinishReason.LENGTH), "model_context_window_exceeded", None),
        ({"context_bound": True}, end(), "end_turn", None),
        ({}, end(FinishReason.CONTENT_FILTER), "refusal", None),
        ({"stops": ("END",)}, end(stop_reason="END"), "stop_sequence", "END"),
        ({"stops": ("17",)}, end(stop_reason="17"), "stop_sequence", "17"),
        # A structured output that was completed for its limit.
        ({"stops": ("END",)}, end(stop_reason="max_tokens"), "end_turn", None),
        ({}, end(stop_reason="17"), "end_turn", None),
    ],
)
def test_a_message_tells_why_it_ended(changes: Any, said: Delta, reason: str, sequence: str | None) -> None:
    shown = whole(head(**changes), [delta("a"), said])
    assert (shown["stop_reason"], shown["stop_sequence"]) == (reason, sequence)
    ended = streamed(head(**changes), [delta("a"), said])[-2].data["delta"]
    assert ended == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_forced_call_is_a_use_of_a_tool() -> None:
    forced = OutputParsing(tools="[]", tool_choice="function", function="f")
    said = [call(0, '{"a": 1}', "call_a", "f"), end()]
    shown = whole(head(parsing=forced), said)
    assert shown["stop_reason"] == "tool_use"
    assert shown["content"] == [{"type": "tool_use", "id": "call_a", "name": "f", "input": {"a": 1}}]


def test_input_that_was_cut_short_is_an_empty_object() -> None:
    said = [call(0, '{"a": ', "call_a", "f"), end(FinishReason.LENGTH)]
    assert whole(head(parsing=AUTO), said)["content"][0]["input"] == {}


def test_hidden_reasoning_is_not_shown() -> None:
    hidden = OutputParsing(reasoning=False)
    said = [delta(reasoning="secret"), delta("a"), end()]
    assert [block["type"] for block in whole(head(parsing=hidden), said)["content"]] == ["text"]
    assert "secret" not in str(streamed(head(parsing=hidden), said))


def test_an_empty_message_has_no_content() -> None:
    assert whole(head(), [end()])["content"] == []
    assert names(streamed(head(), [end()])) == ["message_start", "ping", "message_delta", "message_stop"]


def test_an_error_before_the_first_event_is_a_response_and_later_an_event() -> None:
    for said in ([], [delta("a"), delta("b")], [end()]):
        wire = RecordingWire()
        request = HttpRequest("POST", "/", {}, b"", keep_alive=True, chunked=True)
        exchange = Exchange(request, "r", 0.0, wire, ANTHROPIC_ERRORS)
        answer = MESSAGES_FORMAT.streamed(exchange, head(), lambda: b"")
        for each in said:
            answer.delta(0, each)
        answer.fail(UpstreamError("lost", code="worker_lost"))
        got = received(wire.sent)
        if len(said) < 2:
            assert got.status == 502
            assert got.json["error"]["type"] == "api_error"
        else:
            last = events_of(got.body)[-1]
            assert (last.name, last.data["error"]["message"]) == ("error", "lost")


def test_a_call_that_goes_on_after_another_began_is_a_fault() -> None:
    answer = MESSAGES_FORMAT.streamed(exchange_on(RecordingWire()), head(parsing=AUTO), lambda: b"")
    answer.delta(0, call(0, "{", "a", "f"))
    answer.delta(0, call(1, "{", "b", "g"))
    with pytest.raises(AssertionError):
        answer.delta(0, call(0, "}"))


TEXTS = st.sampled_from(["", "", "a", "é", 'x"\\', "\n", "日本", "\x00", "word "])


@st.composite
def outputs(draw: st.DrawFn, *, parsed: bool) -> list[Delta]:
    """What an engine may say; with `parsed`, also reasoning and tool calls, whose arguments are JSON."""
    made: list[Delta] = []
    calls = 0
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(("text", "reasoning", "call"))) if parsed else "text"
        if kind == "call":
            made.append(call(calls, "", f"call_{calls}", "f"))
            text = json.dumps({"a": draw(TEXTS)})
            at = draw(st.integers(0, len(text)))
            made += [call(calls, text[:at]), delta(draw(TEXTS)), call(calls, text[at:])]
            calls += 1
        else:
            made.append(delta(draw(TEXTS)) if kind == "text" else delta(reasoning=draw(TEXTS)))
    made.append(end(draw(st.sampled_from((FinishReason.STOP, FinishReason.LENGTH))), text=draw(TEXTS)))
    return made


@given(st.data())
def test_a_streamed_message_says_what_the_whole_one_says(data: st.DataObject) -> None:
    parsing = data.draw(st.none() | st.builds(OutputParsing, tools=st.just("[]"), reasoning=st.booleans()))
    shown = head(parsing=parsing, context_bound=data.draw(st.booleans()))
    said = data.draw(outputs(parsed=parsing is not None))
    events, answer = streamed(shown, said), whole(shown, said)
    Message.model_validate(answer)
    assert put_together(events) == answer
    texts = [event.data["delta"].get("text", "") for event in events if event.name == "content_block_delta"]
    assert "".join(texts) == "".join(each.text for each in said)
    at = -1
    for event in events:
        if event.name == "content_block_start":
            at += 1
        if event.name.startswith("content_block"):
            assert event.data["index"] == at
    assert names(events)[0] == "message_start"
    assert names(events)[-2:] == ["message_delta", "message_stop"]


def test_the_fields_of_a_message_are_those_of_the_clients_type() -> None:
    assert set(MessageAnswer.__struct_fields__) <= set(Message.model_fields)
