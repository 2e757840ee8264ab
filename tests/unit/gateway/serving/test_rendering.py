"""Which conversations are rendered in a thread: those that take long, whatever their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir_platform.gateway.openai.schema.decode import decode_chat, decode_completion, decode_tokenize
from kvasir_platform.gateway.serving.generate_api import renders_in_thread

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["word"] * 2000}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [HI] * 512}, False),
        ({"messages": [HI] * 513}, True),
        ({"messages": [{"role": "user", "content": "word " * 40_000}]}, False),
        ({"messages": [{"role": "user", "content": "word " * 60_000}]}, True),
        ({"messages": [HI], "tools": [TOOL]}, False),
        ({"messages": [HI], "tools": [TOOL] * 5}, True),
    ],
    ids=["messages", "many messages", "a long text", "a longer text", "a tool", "large tools"],
)
def test_a_conversation_that_takes_long_is_rendered_in_a_thread(
    fields: dict[str, Any], expected: bool
) -> None:
    data = json.dumps({"model": "m", **fields}).encode()
    assert renders_in_thread(decode_chat(data), None, data) is expected


def test_texts_without_messages_are_not_rendered() -> None:
    data = json.dumps({"model": "m", "prompt": "word " * 60_000}).encode()
    assert not renders_in_thread(decode_completion(data), None, data)
    assert not renders_in_thread(decode_tokenize(data), None, data)
