"""Loops of agents with OpenAI's and Anthropic's clients, and a model that follows instructions."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from tests.kit.frameworks.capable_model import CapableModel, sample

from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities

MODEL = "kvasir-tiny"
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PLACE}}
    for name in ("get_weather", "get_time")
]
ASKED: Any = {"role": "user", "content": "What are the weather and the time in Oslo?"}


@pytest_asyncio.fixture
async def edge(start: Any, tokenizer: Any) -> Any:
    edge = await start(capabilities=ModelCapabilities(tools=True))
    edge.router.script = CapableModel(tokenizer.decode)
    return edge


@pytest.mark.parametrize("streamed", [False, True])
async def test_parallel_calls_and_their_results_make_a_conversation(edge: Any, streamed: bool) -> None:
    client = await edge.client()
    asked: Any = {"model": MODEL, "tools": TOOLS}
    first = await answer(client, streamed, messages=[ASKED], **asked)
    assert first.choices[0].finish_reason == "tool_calls"
    calls = first.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["get_weather", "get_time"]
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo"}
    results: list[Any] = [
        {"role": "tool", "tool_call_id": calls[0].id, "content": [{"type": "text", "text": "sunny"}]},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "Error: no clock"},
    ]
    said = first.choices[0].message.model_dump(exclude_none=True)
    last = await answer(client, streamed, messages=[ASKED, said, *results], **asked)
    assert last.choices[0].message.content == "The result is sunny and Error: no clock."
    assert last.choices[0].finish_reason == "stop"


async def answer(client: openai.AsyncOpenAI, streamed: bool, **asked: Any) -> Any:
    if not streamed:
        return await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked) as stream:
        return await stream.get_final_completion()


async def test_one_call_at_a_time_is_kept_to(edge: Any) -> None:
    client = await edge.client()
    answer = await client.chat.completions.create(
        model=MODEL, messages=[ASKED], tools=TOOLS, parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1


async def test_marks_of_a_cache_have_no_effect_on_the_prompt(edge: Any) -> None:
    client, mark = await edge.client(), {"cache_control": {"type": "ephemeral"}}
    for more in ({}, mark):
        part = {"type": "text", "text": ASKED["content"], **more}
        messages: Any = [
            {"role": "system", "content": "Be brief.", **more},
            {"role": "user", "content": [part]},
        ]
        await client.chat.completions.create(
            model=MODEL, messages=messages, tools=[{**tool, **more} for tool in TOOLS]
        )
    plain, marked = (stream.request for stream in edge.router.streams)
    assert list(plain.tokens) == list(marked.tokens)
    assert plain.parsing == marked.parsing


async def test_the_messages_api_gives_the_same_loop(edge: Any) -> None:
    async with anthropic.AsyncAnthropic(base_url=f"http://{edge.host}:{edge.port}", api_key="x") as client:
        tools: Any = [{"name": tool["function"]["name"], "input_schema": PLACE} for tool in TOOLS]
        asked: Any = {"model": MODEL, "max_tokens": 200, "tools": tools}
        first = await client.messages.create(messages=[ASKED], **asked)
        assert first.stop_reason == "tool_use"
        results: Any = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": f"{block.name} of {block.input['city']}",
            }
            for block in first.content
        ]
        last = await client.messages.create(
            messages=[
                ASKED,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": results},
            ],
            **asked,
        )
    assert last.content[0].text == "The result is get_weather of Oslo and get_time of Oslo."


def test_values_follow_references_and_what_was_asked_for() -> None:
    schema = {
        "$defs": {"Size": {"enum": ["small", "large"]}},
        "properties": {
            "size": {"$ref": "#/$defs/Size"},
            "count": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
            "names": {"type": "array", "items": {"type": "string"}},
            "note": {"type": "string", "default": ""},
        },
        "required": ["size"],
    }
    made = sample(schema, "Order 3 large ones for 'Ada'.")
    assert made == {"size": "large", "count": 3, "names": ["Ada"]}
