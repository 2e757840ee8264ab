"""LiteLLM: chats, tools, streams and JSON through its OpenAI-compatible and its Anthropic provider."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    url = os.environ["KVASIR_URL"]
    base = url if request.param == "anthropic" else f"{url}/v1"
    return {
        "model": f"{request.param}/{os.environ['KVASIR_MODEL']}",
        "api_base": base,
        "api_key": "none",
        "max_tokens": 200,
    }


def test_a_call_and_its_result_make_a_conversation(where: dict[str, Any]) -> None:
    first = litellm.completion(messages=ASKED, tools=[TOOL], **where)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = litellm.completion(messages=[*ASKED, message, result], tools=[TOOL], **where)
    assert "sunny" in second.choices[0].message.content


async def test_a_streamed_call_is_put_together(where: dict[str, Any]) -> None:
    stream = await litellm.acompletion(
        messages=ASKED, tools=[TOOL], stream=True, stream_options={"include_usage": True}, **where
    )
    chunks = [chunk async for chunk in stream]
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather"
    assert whole.usage.prompt_tokens > 0


def test_json_follows_a_schema(where: dict[str, Any]) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    answer = litellm.completion(
        messages=ASKED,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        **where,
    )
    assert "city" in json.loads(answer.choices[0].message.content)
