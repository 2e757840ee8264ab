"""Anthropic's client against real vLLM, with separate prefill and decode: a message says what the same chat
says, streamed and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow

MODEL = "kvasir-tiny"
USER: Any = [{"role": "user", "content": "Tell me of the sea. " * 16}]
TOOL: Any = {
    "name": "weather",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
GREEDY: Any = {"temperature": 0}
FORCED: Any = {
    "model": MODEL,
    "max_tokens": 64,
    "messages": USER,
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "weather"},
    "extra_body": GREEDY,
}


def test_a_message_says_what_the_chat_says(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as chats:
        chat = chats.chat.completions.create(model=MODEL, messages=USER, max_tokens=12, temperature=0)
    assert chat.usage is not None
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 12, "extra_body": GREEDY}
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=60) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            assert [block.to_dict()["text"] for block in message.content] == [chat.choices[0].message.content]
            assert message.stop_reason == (
                "max_tokens" if chat.choices[0].finish_reason == "length" else "end_turn"
            )
            usage = message.usage
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
            assert usage.cache_read_input_tokens
            assert usage.output_tokens == chat.usage.completion_tokens
        assert len(pieces) > 1
        counted = client.messages.count_tokens(model=MODEL, messages=USER)
        assert counted.input_tokens == chat.usage.prompt_tokens
        called: Any = client.messages.create(**FORCED)
        with client.messages.stream(**FORCED) as stream:
            calls: Any = stream.get_final_message()
        assert called.content[0].input == calls.content[0].input
        assert called.content[0].input["city"] in ("Oslo", "Bergen")
        assert called.stop_reason == calls.stop_reason == "tool_use"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(**{**asked, "model": "claude"})
        assert unknown.value.error_code == "model_not_found"
        assert [model.id for model in client.models.list()] == [MODEL, "pirate"]
