"""Whatever deltas come, a stream's events are in order: a client that only follows them has the response."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.gateway.api_answers import RecordingWire as Wire
from tests.kit.gateway.api_answers import exchange_on, received

from kvasir.core.errors import UpstreamError
from kvasir.core.requests import Delta, FinishReason, OutputParsing, ToolCallDelta, Usage
from kvasir_platform.gateway.openai.answer import AnswerHead
from kvasir_platform.gateway.responses.answers import ResponseRecord, StreamedResponse, WholeResponse
from kvasir_platform.gateway.responses.decode import decode_responses

HEAD = AnswerHead(id="resp_1", created=1, model="m", choices=1, parsing=OutputParsing(tools="[]"))
ASKED = decode_responses(b'{"model":"m","input":"x"}')
texts = st.sampled_from(["", "", "a", "b c", "\n", " ", "é"])
arguments = st.sampled_from(["", "{", "}"])
call = st.builds(ToolCallDelta, st.integers(0, 2), st.just("call"), st.just("f"), arguments)
calls = st.lists(call, max_size=2)
steps = st.lists(st.tuples(texts, texts, calls, st.sampled_from([None, None, True, False])), max_size=12)
ends = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, None])


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named as its data says."""
    made = []
    for block in body.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        event = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        made.append(event)
    return made


class Follower:
    """A client that builds the response from its events, and checks that each may come."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.text: dict[tuple[int, str], str] = {}
        self.parts: set[int] = set()
        self.done: dict[int, dict[str, Any]] = {}
        self.ended: dict[str, Any] | None = None

    def take(self, event: dict[str, Any], number: int) -> None:
        assert event["sequence_number"] == number
        assert self.ended is None
        kind = event["type"].removeprefix("response.")
        if number < 2:
            assert kind == ("created", "in_progress")[number]
            assert event["response"]["output"] == []
        elif kind in ("completed", "incomplete", "failed"):
            self.ended = event["response"]
            assert self.ended["status"] == kind
        elif kind == "output_item.added":
            assert event["output_index"] == len(self.items)
            assert event["item"]["status"] == "in_progress"
            self.items.append(event["item"])
        else:
            self._inside(kind, event)

    def _inside(self, kind: str, event: dict[str, Any]) -> None:
        index = event["output_index"]
        item = self.items[index]
        assert index not in self.done
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            self.done[index] = event["item"]
            return
        assert event["item_id"] == item["id"]
        what, _, act = kind.rpartition(".")
        if what == "content_part":
            assert (index in self.parts) is (act == "done")
            assert item["type"] != "function_call"
            self.parts.add(index)
            if act == "done":
                assert event["part"]["text"] == self.text[index, "delta"]
        elif act == "delta":
            assert event["delta"]
            assert (index, "done") not in self.text
            assert index in self.parts or item["type"] == "function_call"
            self.text[index, "delta"] = self.text.get((index, "delta"), "") + event["delta"]
        else:
            whole = event.get("text", event.get("arguments"))
            assert whole == self.text.get((index, "delta"), "")
            self.text[index, "done"] = whole


def deltas(made: list[Any], end: FinishReason | None) -> list[Delta]:
    out = [
        Delta("r", i, (i,), text=text, reasoning=reasoning, tool_calls=tuple(pieces))
        for i, (text, reasoning, pieces, _) in enumerate(made)
    ]
    return out if end is None else [*out, Delta("r", len(out), finish=end, last=True)]


def record() -> ResponseRecord:
    return ResponseRecord(ASKED, HEAD, None, lambda: 2.0)


@given(steps, ends)
def test_events_follow_their_order_and_make_the_response(made: list[Any], end: FinishReason | None) -> None:
    wire = Wire()
    exchange = exchange_on(wire)
    answer = StreamedResponse(exchange, record(), lambda: b"")
    lagging = [each[3] for each in made]
    for i, delta in enumerate(deltas(made, end)):
        notice = lagging[i] if i < len(lagging) else None
        if notice is not None and exchange.on_lagging is not None and exchange.on_caught_up is not None:
            (exchange.on_lagging if notice else exchange.on_caught_up)()
        answer.delta(0, delta)
    if end is None:
        answer.fail(UpstreamError("lost"))
    else:
        answer.finish(Usage(), b"")
    shown = received(wire.sent)
    if end is None and shown.status != 200:
        return
    follower = Follower()
    for number, event in enumerate(events_of(shown.body)):
        follower.take(event, number)
    assert follower.ended is not None
    if end is None:
        assert follower.ended["status"] == "failed"
        return
    assert follower.ended["output"] == [follower.done[i] for i in range(len(follower.items))]
    whole_wire = Wire()
    whole = WholeResponse(exchange_on(whole_wire), record())
    for delta in deltas(made, end):
        whole.delta(0, delta)
    whole.finish(Usage(), b"")
    assert msgspec.json.decode(received(whole_wire.sent).body) == follower.ended


def test_text_of_a_lagging_client_is_joined_and_numbers_have_no_gap() -> None:
    wire = Wire()
    exchange = exchange_on(wire)
    answer = StreamedResponse(exchange, record(), lambda: b"")
    answer.delta(0, Delta("r", 0, (0,), text="a"))
    assert exchange.on_lagging is not None
    exchange.on_lagging()
    for i, text in enumerate("bcd", 1):
        answer.delta(0, Delta("r", i, (i,), text=text))
    answer.delta(0, Delta("r", 4, (4,), text="e", finish=FinishReason.STOP))
    answer.finish(Usage(), b"")
    events = events_of(received(wire.sent).body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["delta"] for e in events if e["type"].endswith(".delta")] == ["a", "bcd", "e"]


def test_white_space_alone_is_still_an_answer() -> None:
    made = record()
    made.output.add(Delta("r", 0, (0,), text=" \n"))
    made.output.add(Delta("r", 1, (1,), finish=FinishReason.STOP))
    made.output.end()
    assert made.output.items[0]["content"][0]["text"] == " \n"
