"""How responses encode engine output: reasoning, tool calls, echoes, ids, usage and times."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit.gateway.api_answers import RecordingWire, exchange_on, ids, joined, received, streamed, whole

from kvasir.core.errors import CapacityError
from kvasir.core.requests import (
    Delta,
    FinishReason,
    OutputParsing,
    PositionLogprobs,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from kvasir_platform.gateway.openai.answer import AnswerHead, Prompt
from kvasir_platform.gateway.openai.streamed_answer import ChatShape, StreamedAnswer

AUTO = OutputParsing(tools="[]", tool_choice="auto")
CALLS = (
    Delta("r", 0, (1,), reasoning="Hm"),
    Delta("r", 1, (2,), tool_calls=(ToolCallDelta(0, "c0", "look"), ToolCallDelta(0, arguments='{"a"'))),
    Delta("r", 2, (3,), tool_calls=(ToolCallDelta(0, arguments=":1}"), ToolCallDelta(1, "c1", "go", "{}"))),
)
END = Delta("r", 3, (4,), finish=FinishReason.STOP, reasoning_tokens=1)


def head(**changes: Any) -> AnswerHead:
    return AnswerHead(**{"id": "a", "created": 1, "model": "m", "choices": 1, "parsing": AUTO, **changes})


def message(
    parsing: OutputParsing = AUTO, *deltas: Delta, **changes: Any
) -> tuple[dict[str, Any], str | None]:
    """The message and finish reason that both kinds of answer agree on."""
    shown = head(parsing=parsing, **changes)
    choice = whole(shown, list(deltas or (*CALLS, END))).json["choices"][0]
    assert joined(streamed(shown, list(deltas or (*CALLS, END))).events)["choices"][0] == choice
    return choice["message"], choice["finish_reason"]


def test_tool_calls_are_put_together_and_content_is_null_beside_them() -> None:
    said, finish = message()
    assert finish == "tool_calls"
    assert said["content"] is None
    assert said["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}},
        {"id": "c1", "type": "function", "function": {"name": "go", "arguments": "{}"}},
    ]


def test_each_chunk_has_one_piece_of_a_call_and_its_id_and_name_come_once() -> None:
    events = streamed(head(), [*CALLS, END]).events
    pieces = [
        e["choices"][0]["delta"]["tool_calls"] for e in events if "tool_calls" in e["choices"][0]["delta"]
    ]
    assert pieces[0] == [
        {"index": 0, "id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"a"'}}
    ]
    assert pieces[1][0] == {"index": 0, "function": {"arguments": ":1}"}}
    assert [piece["index"] for piece in pieces[1]] == [0, 1]


def test_reasoning_is_spelled_as_vllm_and_as_deepseek_spell_it() -> None:
    said, _ = message()
    assert said["reasoning"] == said["reasoning_content"] == "Hm"


@pytest.mark.parametrize(
    ("parsing", "end", "finish"),
    [
        (AUTO, FinishReason.STOP, "tool_calls"),
        (OutputParsing(tools="[]", tool_choice="required"), FinishReason.STOP, "tool_calls"),
        (OutputParsing(tools="[]", tool_choice="look", function="look"), FinishReason.STOP, "stop"),
        (AUTO, FinishReason.LENGTH, "length"),
        (AUTO, FinishReason.CONTENT_FILTER, "content_filter"),
    ],
)
def test_calls_change_the_word_for_a_natural_stop_that_the_client_did_not_force(
    parsing: OutputParsing, end: FinishReason, finish: str
) -> None:
    assert message(parsing, *CALLS, Delta("r", 3, (4,), finish=end))[1] == finish


def test_a_client_that_wants_one_call_at_a_time_gets_the_first() -> None:
    said, _ = message(OutputParsing(tools="[]", tool_choice="auto", parallel_tool_calls=False))
    assert [call["id"] for call in said["tool_calls"]] == ["c0"]


def test_the_old_api_spells_its_call_as_it_did() -> None:
    said, finish = message(AUTO, legacy_functions=True)
    assert finish == "function_call"
    assert said["function_call"] == {"name": "look", "arguments": '{"a":1}'}
    assert "tool_calls" not in said


def test_hidden_reasoning_is_told_neither_in_words_nor_in_tokens() -> None:
    hidden = OutputParsing(tools="", reasoning=False)
    secret = PositionLogprobs(TokenLogprob(1, "secret", -0.1))
    said = [
        Delta("r", 0, (1,), logprobs=(secret,), reasoning="secret"),
        Delta("r", 1, (2,), "fine", logprobs=(secret,), finish=FinishReason.STOP),
    ]
    shown = head(parsing=hidden, logprobs=1, return_token_ids=True, prompts=(Prompt(ids(9)),))
    for answer in (streamed(shown, said).body, whole(shown, said).body):
        assert b"fine" in answer
        assert b"secret" not in answer
        assert b'"token_ids"' not in answer


def test_usage_tells_reasoning_and_cached_tokens() -> None:
    usage = Usage(prompt_tokens=9, cached_tokens=8, output_tokens=4)
    told = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    shown = head(include_usage=True)
    assert whole(shown, [*CALLS, END], usage).json["usage"] == told
    events = streamed(shown, [*CALLS, END], usage).events
    assert events[-1]["usage"] == told
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])


def test_continuous_usage_counts_each_choice_by_itself() -> None:
    shown = head(parsing=None, choices=2, continuous_usage=True, prompts=(Prompt(ids(1, 2, 3)),))
    said = [Delta("r", 0, (1, 2), "a"), Delta("r", 0, (1,), "b", index=1), Delta("r", 2, (3,), "c")]
    events = streamed(shown, said).events
    counted = [
        (e["choices"][0]["index"], e["usage"]) for e in events if e["choices"][0]["delta"].get("content")
    ]
    assert [(index, usage["completion_tokens"]) for index, usage in counted] == [(0, 2), (1, 1), (0, 3)]
    assert {usage["prompt_tokens"] for _, usage in counted} == {3}


def position(token: int, text: str, *top: tuple[int, str]) -> PositionLogprobs:
    return PositionLogprobs(
        TokenLogprob(token, text, -0.5), tuple(TokenLogprob(i, t, -1.0 - n) for n, (i, t) in enumerate(top))
    )


PROMPT_POSITIONS = (None, position(6, "lo", (7, "x"), (6, "lo")))
ECHO = {
    "parsing": None,
    "prompts": (Prompt(ids(5, 6), "hello", "hel"),),
    "echo": True,
    "logprobs": 1,
}


@pytest.mark.parametrize("chat", [False])
def test_an_echo_has_the_prompt_first_and_counts_offsets_from_its_start(chat: bool) -> None:
    said = [
        Delta("r", 0, (8,), " you", logprobs=(position(8, " you"),), prompt_logprobs=PROMPT_POSITIONS),
        Delta("r", 1, (9,), "!", logprobs=(position(9, "!"),), finish=FinishReason.STOP),
    ]
    for choice in (
        whole(head(**ECHO), said, chat=chat).json["choices"][0],
        joined(streamed(head(**ECHO), said, chat=chat).events, chat=chat)["choices"][0],
    ):
        assert choice["text"] == "hello you!"
        assert choice["logprobs"]["tokens"] == ["hel", "lo", " you", "!"]
        assert choice["logprobs"]["text_offset"] == [0, 3, 5, 9]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"x": -1.0, "lo": -0.5}]


def test_a_call_for_its_prompt_only_shows_nothing_that_was_generated() -> None:
    said = [Delta("r", 0, (8,), " you", prompt_logprobs=PROMPT_POSITIONS, finish=FinishReason.LENGTH)]
    answer = whole(
        head(**ECHO, prompt_only=True), said, Usage(prompt_tokens=2, output_tokens=1), chat=False
    ).json
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["hel", "lo"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs_of_a_prompt_are_in_vllms_shape() -> None:
    said = [Delta("r", 0, (8,), "a", prompt_logprobs=PROMPT_POSITIONS, finish=FinishReason.STOP)]
    shown = head(parsing=None, prompt_logprobs=2, prompts=(Prompt(ids(5, 6)),))
    assert whole(shown, said).json["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -0.5, "rank": 2, "decoded_token": "lo"},
            "7": {"logprob": -1.0, "rank": 1, "decoded_token": "x"},
        },
    ]
    assert "prompt_logprobs" in whole(shown, said, chat=False).json["choices"][0]


def test_a_logprob_of_minus_infinity_is_a_number_in_json() -> None:
    never = PositionLogprobs(TokenLogprob(1, "a", float("-inf")))
    said = [Delta("r", 0, (1,), "a", logprobs=(never,), finish=FinishReason.STOP)]
    shown = head(parsing=None, logprobs=0)
    assert whole(shown, said).json["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert whole(shown, said, chat=False).json["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_ids_of_a_prompt_come_once_and_those_of_the_output_with_each_chunk() -> None:
    shown = head(parsing=None, return_token_ids=True, prompts=(Prompt(ids(5, 6)),))
    said = [Delta("r", 0, (1,), ""), Delta("r", 1, (2,), "b", finish=FinishReason.STOP)]
    events = streamed(shown, said).events
    assert [event.get("prompt_token_ids") for event in events] == [[5, 6], None, None]
    assert [event["choices"][0].get("token_ids") for event in events] == [None, [1], [2]]
    assert whole(shown, said).json["prompt_token_ids"] == [5, 6]


def test_the_time_at_the_end_of_a_stream_is_a_trailer_or_a_comment_for_those_who_ask() -> None:
    said = [Delta("r", 0, (1,), "a", finish=FinishReason.STOP)]
    for headers, trailers, comment in (
        ({}, {}, False),
        ({b"te": b"gzip;q=0.5, trailers"}, {"server-timing": "total;dur=2.00"}, False),
        ({b"x-kvasir-server-timing": b"comment"}, {}, True),
    ):
        answer = streamed(head(parsing=None), said, headers=headers)
        assert answer.headers["server-timing"] == "admit;dur=1.00"
        assert answer.headers.get("trailer") == ("server-timing" if trailers else None)
        assert answer.trailers == trailers
        assert (b": server-timing: total;dur=2.00\n\ndata: [DONE]\n\n" in answer.body) is comment


def lagging() -> tuple[RecordingWire, StreamedAnswer]:
    """A stream that has begun, and whose client lags."""
    wire = RecordingWire()
    exchange = exchange_on(wire)
    answer = StreamedAnswer(exchange, head(parsing=None), ChatShape(), lambda: b"")
    answer.delta(0, Delta("r", 0, (1,), "a"))
    assert exchange.on_lagging is not None
    exchange.on_lagging()
    return wire, answer


def test_a_failing_stream_gives_what_a_lagging_client_had_not_been_sent_yet() -> None:
    wire, answer = lagging()
    answer.delta(0, Delta("r", 1, (2,), "b"))
    assert b'"b"' not in wire.sent
    answer.fail(CapacityError("lost"))
    events = received(wire.sent).events
    assert events[-2]["choices"][0]["delta"] == {"content": "b"}
    assert events[-1]["error"]["code"] == "no_capacity"


def test_what_is_held_for_a_client_that_lags_is_bounded() -> None:
    wire, answer = lagging()
    before = wire.writes
    for i in range(1000):
        answer.delta(0, Delta("r", 1 + i, (2,), "x" * 100))
    assert before < wire.writes < before + 20
    assert received_so_far(wire) > 90_000


def received_so_far(wire: RecordingWire) -> int:
    return wire.sent.count(b"x")


def test_a_plain_token_of_a_running_stream_is_one_write() -> None:
    wire = RecordingWire()
    answer = StreamedAnswer(exchange_on(wire), head(parsing=None), ChatShape(), lambda: b"")
    answer.delta(0, Delta("r", 0, (1,), "a"))
    before = wire.writes
    for i in range(10):
        answer.delta(0, Delta("r", 1 + i, (2,), " b"))
    assert wire.writes == before + 10


def test_the_last_delta_of_an_answer_and_its_end_are_one_write() -> None:
    wire = RecordingWire()
    answer = StreamedAnswer(exchange_on(wire), head(parsing=None, choices=2), ChatShape(), lambda: b"")
    for choice in (0, 1):
        answer.delta(choice, Delta("r", 0, (1,), "a"))
    before = wire.writes
    answer.delta(0, Delta("r0", 1, (2,), "b", finish=FinishReason.STOP, last=True))
    assert wire.writes == before + 1
    answer.delta(1, Delta("r1", 1, (2,), "c", finish=FinishReason.STOP, last=True))
    answer.finish(Usage(), b"")
    assert wire.writes == before + 2
    contents = [event["choices"][0]["delta"].get("content") for event in received(wire.sent).events]
    assert [content for content in contents if content] == ["a", "a", "b", "c"]


def test_a_failure_after_the_last_delta_is_sent_behind_it() -> None:
    wire = RecordingWire()
    answer = StreamedAnswer(exchange_on(wire), head(parsing=None), ChatShape(), lambda: b"")
    answer.delta(0, Delta("r", 0, (1,), "a"))
    answer.delta(0, Delta("r", 1, (2,), "b", finish=FinishReason.STOP, last=True))
    answer.fail(CapacityError("lost"))
    events = received(wire.sent).events
    assert events[-2]["choices"][0]["delta"] == {"content": "b"}
    assert events[-1]["error"]["code"] == "no_capacity"
