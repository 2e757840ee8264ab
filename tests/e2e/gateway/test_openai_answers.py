"""OpenAI's client reads reasoning, tool calls and echoes as intended."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.core.requests import FinishReason, PositionLogprobs, TokenLogprob, ToolCallDelta
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities

MODEL = "kvasir-tiny"
USER: Any = [{"role": "user", "content": "Which way?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ABLE = ModelCapabilities(tools=True, reasoning=True)
CHAT = "/v1/chat/completions"
STREAM = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}],"stream":true}'


def looking(stream: ScriptedStream) -> None:
    """Some thought, and a call in pieces."""
    stream.emit("", reasoning="Let me ")
    stream.emit("", reasoning="look.")
    stream.emit("", tool_calls=(ToolCallDelta(0, "call_1", "look", '{"at":'),))
    stream.emit(
        "", tool_calls=(ToolCallDelta(0, arguments='"map"}'), ToolCallDelta(1, "call_2", "look", "{}"))
    )
    stream.emit("", finish=FinishReason.STOP, reasoning_tokens=2)
    stream.finish(cached=1)


async def test_a_streamed_call_is_what_the_whole_one_is(start: Any) -> None:
    edge = await start(capabilities=ABLE)
    edge.router.script = looking
    client = await edge.client()
    asked: Any = {"model": MODEL, "messages": USER, "tools": TOOLS}
    whole = await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        assert [(call.id, call.function.name) for call in choice.message.tool_calls] == [
            ("call_1", "look"),
            ("call_2", "look"),
        ]
        assert choice.message.tool_calls[0].function.arguments == '{"at":"map"}'
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning"] == "Let me look."
        assert choice.message.model_extra["reasoning_content"] == "Let me look."
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2
        assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_the_old_functions_are_answered_in_the_old_words(start: Any) -> None:
    edge = await start(capabilities=ABLE)
    edge.router.script = looking
    client = await edge.client()
    functions: Any = [{"name": "look", "parameters": {"type": "object"}}]
    answer = await client.chat.completions.create(model=MODEL, messages=USER, functions=functions)
    assert answer.choices[0].finish_reason == "function_call"
    assert answer.choices[0].message.function_call is not None
    assert answer.choices[0].message.function_call.arguments == '{"at":"map"}'


def echoing(stream: ScriptedStream) -> None:
    """One token behind a prompt whose logprobs are known."""
    prompt = [PositionLogprobs(TokenLogprob(token, "?", -1.0)) for token in stream.request.tokens]
    stream.emit(
        "!",
        logprobs=(PositionLogprobs(TokenLogprob(0, "!", -0.5)),),
        prompt_logprobs=(None, *prompt[1:]),
        finish=FinishReason.LENGTH,
    )
    stream.finish()


@pytest.mark.parametrize("limit", [0, 1])
async def test_an_echo_scores_the_prompt(edge: Any, limit: int) -> None:
    edge.router.script = echoing
    client = await edge.client()
    answer = await client.completions.create(
        model=MODEL, prompt="The quick brown fox", max_tokens=limit, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    assert choice.text == "The quick brown fox" + "!" * limit
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == len(edge.router.streams[0].request.tokens) + limit
    assert answer.usage.completion_tokens == limit


async def test_a_client_that_takes_trailers_is_told_where_the_time_went(edge: Any) -> None:
    edge.router.script = looking
    reader, writer = await edge.connect()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nTE: trailers\r\nContent-Length: {len(STREAM)}\r\n\r\n"
    writer.write(head.encode() + STREAM)
    answer = await reader.readuntil(b"0\r\nserver-timing: admit;")
    assert b"\r\ntrailer: server-timing\r\n" in answer
    rest = await reader.readuntil(b"\r\n\r\n")
    assert b", decode;dur=" in rest
