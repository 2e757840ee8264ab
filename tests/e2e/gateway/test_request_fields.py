"""Requests of OpenAI's client reach the router with the intended meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.core.requests import Constraint, Request, StructuredOutput
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities

USER: Any = [{"role": "user", "content": "Who is there?"}]
TOOL: Any = {"type": "function", "function": {"name": "knock", "parameters": {"type": "object"}}}


def answer(stream: ScriptedStream) -> None:
    stream.emit("ok")
    stream.finish()


async def asked(edge: Any, **fields: Any) -> Request:
    """The request that a chat with `fields` makes."""
    edge.router.script = answer
    client = await edge.client()
    await client.chat.completions.create(model="kvasir-tiny", messages=USER, **fields)
    request: Request = edge.router.streams[-1].request
    return request


async def test_tools_and_a_schema_reach_the_worker(start: Callable[..., Any]) -> None:
    edge = await start(capabilities=ModelCapabilities(tools=True, reasoning=True))
    request = await asked(
        edge,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="low",
        extra_body={"include_reasoning": False, "thinking_token_budget": 8},
    )
    assert request.parsing is not None
    assert '"knock"' in request.parsing.tools
    assert request.parsing.tool_choice == "required"
    assert (request.parsing.parallel_tool_calls, request.parsing.reasoning) == (False, False)
    assert request.parsing.template_kwargs == '{"reasoning_effort":"low","enable_thinking":true}'
    assert request.sampling.thinking_tokens == 8
    schema = {"name": "x", "schema": {"type": "object"}}
    request = await asked(edge, response_format={"type": "json_schema", "json_schema": schema})
    assert request.sampling.structured == StructuredOutput(Constraint.JSON_SCHEMA, '{"type":"object"}')


async def test_a_model_without_parsers_streams_plain_text(edge: Any) -> None:
    assert (await asked(edge)).parsing is None
    with pytest.raises(openai.BadRequestError, match=r"engine\.tool_parser"):
        await asked(edge, tools=[TOOL])


async def test_hints_reach_the_router(edge: Any) -> None:
    request = await asked(edge, prompt_cache_key="talk-1", user="ann", extra_body={"priority": -3})
    assert (request.session, request.priority) == ("talk-1", 1000)
    request = await asked(edge, user="ann", extra_headers={"x-session-id": "talk-2"})
    assert request.session == "talk-2"


async def test_a_long_prompt_is_cut_where_that_is_wanted(edge: Any) -> None:
    edge.router.script = answer
    client = await edge.client()
    for side, kept in (("left", [2, 3, 4]), ("right", [0, 1, 2]), (None, [2, 3, 4])):
        extra = {"truncate_prompt_tokens": 3, "truncation_side": side}
        await client.completions.create(model="kvasir-tiny", prompt=list(range(5)), extra_body=extra)
        assert list(edge.router.streams[-1].request.tokens) == kept
    room = {"truncate_prompt_tokens": -1}
    prompt = [5] * 5000
    await client.completions.create(model="kvasir-tiny", prompt=prompt, max_tokens=96, extra_body=room)
    request = edge.router.streams[-1].request
    assert (len(request.tokens), request.sampling.max_tokens) == (4000, 96)
