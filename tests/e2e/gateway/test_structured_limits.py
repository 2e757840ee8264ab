"""JSON and forced calls that every client can parse, however little the model follows: kvasir-tiny without a
parser of calls, by OpenAI's client, whole and streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest
from tests.kit.gateway.chats import called, chat

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow

NOTE = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "words": {"type": "array", "items": {"type": "string"}},
        "rating": {"type": "number"},
    },
    "required": ["title", "words", "rating"],
}
SAVE: Any = {"type": "function", "function": {"name": "save", "parameters": NOTE}}
PING: Any = {"type": "function", "function": {"name": "ping"}}
NAMED: Any = {"type": "function", "function": {"name": "ping"}}
DRAWN: Any = {"temperature": 1.0, "max_tokens": 120}


def test_json_and_forced_calls_can_be_parsed_within_their_limit(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for seed in range(3):
            schema: Any = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
            noted = chat(client, response_format=schema, seed=seed, **DRAWN)
            jsonschema.validate(json.loads(noted.message.content), NOTE)
            free = chat(client, response_format={"type": "json_object"}, seed=seed, **DRAWN)
            assert isinstance(json.loads(free.message.content), dict)
            required = chat(client, tools=[SAVE, PING], tool_choice="required", seed=seed, **DRAWN)
            made = called(required)
            assert made
            for name, arguments in made:
                jsonschema.validate(json.loads(arguments), NOTE if name == "save" else {"const": {}})
            named = chat(client, tools=[SAVE, PING], tool_choice=NAMED, seed=seed, **DRAWN)
            assert called(named) == [("ping", "{}")]
            ends = [each.finish_reason for each in (noted, free, required, named)]
            assert ends == ["stop", "stop", "tool_calls", "stop"]
        assert noted.stop_reason == "max_tokens", "it writes strings without end"
        unusable = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "nonsense"}}}}}
        with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.function\.parameters: .*nonsense"):
            chat(client, tools=[SAVE, {"type": "function", **unusable}], tool_choice="required")
