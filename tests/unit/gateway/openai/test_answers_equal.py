"""A streamed and a whole response of the same deltas are equal, and both are OpenAI's objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.kit.gateway.api_answers import ids, joined, plain, streamed, whole

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

TEXTS = st.sampled_from(["", "", "a", "é", 'x"\\', "\n", "日本", "\x00", "word "])
ENDS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTENT_FILTER])
LOGPROBS = st.sampled_from([-0.5, -3.25, float("-inf"), float("nan"), 0.0])
PROMPT = ids(5, 6, 7)


def position(draw: st.DrawFn, token: int) -> PositionLogprobs:
    text = draw(TEXTS)
    top = tuple(TokenLogprob(100 + i, f"{text}{i}", draw(LOGPROBS)) for i in range(2))
    return PositionLogprobs(TokenLogprob(token, text, draw(LOGPROBS)), top)


@st.composite
def choice(draw: st.DrawFn, index: int, *, parsed: bool) -> list[Delta]:
    """What an engine may say of one choice; with `parsed`, also reasoning and tool calls."""
    made, offset, calls = [], 0, 0
    steps = draw(st.integers(1, 6))
    for step in range(steps):
        count = draw(st.integers(0, 3))
        tokens = tuple(range(offset, offset + count))
        pieces: list[ToolCallDelta] = []
        kinds = draw(st.sampled_from([("text",), ("reasoning",), ("calls",), ("text", "reasoning", "calls")]))
        if parsed and "calls" in kinds:
            if not calls or draw(st.booleans()):
                pieces.append(ToolCallDelta(calls, f"call_{index}_{calls}", f"f{calls}", draw(TEXTS)))
                calls += 1
            pieces += [
                ToolCallDelta(calls - 1, arguments=draw(TEXTS)) for _ in range(draw(st.integers(0, 2)))
            ]
        end = step == steps - 1
        made.append(
            Delta(
                "r",
                offset,
                tokens,
                draw(TEXTS) if "text" in kinds or not parsed else "",
                index,
                logprobs=tuple(position(draw, token) for token in tokens),
                finish=draw(ENDS) if end else None,
                stop_reason=draw(st.none() | st.sampled_from(("END", "17"))) if end else None,
                reasoning=draw(TEXTS) if parsed and "reasoning" in kinds else "",
                tool_calls=tuple(pieces),
                reasoning_tokens=draw(st.integers(0, 9)) if end and parsed else 0,
            )
        )
        offset += count
    return made


@st.composite
def deltas(draw: st.DrawFn, choices: int, *, parsed: bool) -> list[Delta]:
    """The deltas of all choices of one prompt as steps bring them, the first one maybe with the
    prompt's logprobs."""
    waiting = [draw(choice(index, parsed=parsed)) for index in range(choices)]
    made = []
    while any(waiting):
        each = draw(st.sampled_from([one for one in waiting if one]))
        made.append(each.pop(0))
    if draw(st.booleans()):
        rest = tuple(position(draw, token) for token in PROMPT[1:])
        made[0] = replace(made[0], prompt_logprobs=(None, *rest))
    return made


PARSINGS = st.builds(
    OutputParsing,
    tools=st.just("[]"),
    tool_choice=st.just("auto"),
    function=st.sampled_from(["", "f0"]),
    parallel_tool_calls=st.booleans(),
    reasoning=st.booleans(),
)


@given(st.data())
def test_a_streamed_chat_says_what_the_whole_one_says(data: st.DataObject) -> None:
    choices = data.draw(st.integers(1, 3))
    parsing = data.draw(st.none() | PARSINGS)
    head = AnswerHead(
        id="chatcmpl-1",
        created=1,
        model="m",
        choices=choices,
        logprobs=data.draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=data.draw(st.sampled_from([None, 0, 2])),
        tokens_as_ids=data.draw(st.booleans()),
        include_usage=True,
        continuous_usage=data.draw(st.booleans()),
        prompts=(Prompt(PROMPT),),
        return_token_ids=data.draw(st.booleans()),
        parsing=parsing,
        legacy_functions=parsing is not None and data.draw(st.booleans()),
    )
    said = data.draw(deltas(choices, parsed=parsing is not None))
    usage = Usage(prompt_tokens=3, cached_tokens=2, output_tokens=sum(len(d.token_ids) for d in said))
    stream = streamed(head, said, usage)
    answer = whole(head, said, usage).json
    for event in stream.events:
        ChatCompletionChunk.model_validate(event)
    ChatCompletion.model_validate(answer)
    assert joined(stream.events) == plain(answer)


@given(st.data())
def test_a_streamed_completion_says_what_the_whole_one_says(data: st.DataObject) -> None:
    prompts, n = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    echo = data.draw(st.booleans())
    head = AnswerHead(
        id="cmpl-1",
        created=1,
        model="m",
        choices=prompts * n,
        logprobs=data.draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=data.draw(st.sampled_from([None, 0, 2])),
        tokens_as_ids=data.draw(st.booleans()),
        include_usage=True,
        prompts=tuple(Prompt(PROMPT, f"prompt {i}", "first") for i in range(prompts)),
        echo=echo,
        prompt_only=echo and data.draw(st.booleans()),
        return_token_ids=data.draw(st.booleans()),
    )
    legs = [data.draw(deltas(n, parsed=False)) for _ in range(prompts)]
    said = [replace(delta, index=i * n + delta.index) for i, leg in enumerate(legs) for delta in leg]
    usage = Usage(prompt_tokens=3 * prompts, output_tokens=sum(len(d.token_ids) for d in said))
    stream = streamed(head, said, usage, chat=False)
    answer = whole(head, said, usage, chat=False).json
    if not echo:
        Completion.model_validate(answer)
    assert joined(stream.events, chat=False) == plain(answer)


@given(st.data())
def test_a_client_that_lags_gets_the_same_in_fewer_pieces(data: st.DataObject) -> None:
    choices = data.draw(st.integers(1, 2))
    parsing = data.draw(st.none() | PARSINGS)
    head = AnswerHead(id="chatcmpl-1", created=1, model="m", choices=choices, parsing=parsing)
    said = data.draw(deltas(choices, parsed=parsing is not None))
    lags = data.draw(st.dictionaries(st.integers(1, len(said)), st.booleans(), min_size=1))
    prompt, lagging = streamed(head, said), streamed(head, said, lags=lags)
    assert joined(lagging.events) == joined(prompt.events)
    assert len(lagging.events) <= len(prompt.events)


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_without_any_token_is_the_same_both_ways(chat: bool) -> None:
    head = AnswerHead(id="a", created=1, model="m", choices=1, include_usage=True)
    said = [Delta("r", 0, finish=FinishReason.STOP)]
    answer: Any = whole(head, said, chat=chat).json
    assert joined(streamed(head, said, chat=chat).events, chat=chat) == plain(answer)
