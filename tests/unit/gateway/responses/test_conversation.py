"""A body of the Responses API is the chat that it means."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.openai.schema.chat import ChatBody, Message
from kvasir_platform.gateway.responses.conversation import chat_body, responses_param
from kvasir_platform.gateway.responses.decode import decode_items, decode_responses

CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "a map"}
THOUGHT: dict[str, Any] = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}


def chat(earlier: list[dict[str, Any]] | None = None, **fields: Any) -> ChatBody:
    asked = decode_responses(msgspec.json.encode({"model": "m", "input": "Hi", **fields}))
    return chat_body(asked, decode_items(msgspec.json.encode(earlier or [])), default_output=64)


def messages(*items: dict[str, Any], **fields: Any) -> list[Message]:
    return chat(input=list(items), **fields).messages


def text(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_string_is_a_message_of_the_user_after_the_instructions() -> None:
    system, user = chat(instructions="Be brief.").messages
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (user.role, user.content) == ("user", "Hi")


def test_what_the_model_produced_in_one_turn_is_one_message() -> None:
    made = messages(
        text("user", "Where?"),
        THOUGHT,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {**CALL, "call_id": "c2"},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "a globe"}]},
        text("user", "And?"),
    )
    assert [message.role for message in made] == ["user", "assistant", "tool", "tool", "user"]
    turn = made[1]
    assert (turn.reasoning_content, turn.content) == ("Hm.", "I look.")
    assert [call.id for call in turn.tool_calls or ()] == ["c1", "c2"]
    assert [(each.tool_call_id, each.content) for each in made[2:4]] == [("c1", "a map"), ("c2", "a globe")]


def test_a_second_text_of_the_model_begins_another_message() -> None:
    made = messages(text("user", "a"), text("assistant", "b"), text("assistant", "c"), CALL, THOUGHT, CALL)
    assert [message.content for message in made] == ["a", "b", "c", None]
    assert made[-1].reasoning_content == "Hm."
    assert len(made[2].tool_calls or ()) == 1


def test_reasoning_that_only_its_provider_can_read_leaves_no_message() -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"}
    assert [message.role for message in messages(text("user", "a"), sealed, text("user", "b"))] == [
        "user"
    ] * 2
    with pytest.raises(RequestError):
        messages(sealed)


def test_system_messages_at_the_beginning_are_one() -> None:
    made = messages(text("developer", "one"), text("system", "two"), text("user", "x"), instructions="zero")
    assert [message.role for message in made] == ["system", "user"]
    assert made[0].content == "zero\n\none\n\ntwo"
    assert messages(text("developer", "one"), text("user", "x"))[0].role == "developer"


def test_earlier_items_come_between_instructions_and_input() -> None:
    earlier = [text("user", "a"), text("assistant", "b")]
    made = chat(earlier, instructions="zero").messages
    assert [message.content for message in made] == ["zero", "a", "b", "Hi"]


def test_options_keep_their_meaning() -> None:
    made = chat(
        max_output_tokens=9,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        top_logprobs=3,
        prompt_cache_key="k",
        stream=True,
        parallel_tool_calls=False,
    )
    assert made.max_completion_tokens == 9
    assert made.reasoning_effort == "low"
    assert msgspec.to_builtins(made.response_format)["json_schema"]["schema"] == {"type": "object"}
    assert (made.logprobs, made.top_logprobs) == (True, 3)
    assert made.session == "k"
    assert made.stream is True
    assert made.parallel_tool_calls is False
    assert made.truncate_prompt_tokens is None


def test_truncation_leaves_room_for_the_output() -> None:
    made = chat(truncation="auto")
    assert (made.truncate_prompt_tokens, made.max_completion_tokens) == (-1, 64)


def test_allowed_tools_are_those_that_are_offered() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": name, "parameters": {}} for name in ("a", "b")
    ]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    made = chat(tools=tools, tool_choice=choice)
    assert [tool.function.name for tool in made.tools or ()] == ["b"]
    assert made.tool_choice == "required"
    named = chat(tools=tools, tool_choice={"type": "function", "name": "a"})
    assert msgspec.to_builtins(named.tool_choice)["function"] == {"name": "a"}


@pytest.mark.parametrize(
    ("param", "shown"),
    [
        ("messages", "input"),
        ("messages[3].content", "input"),
        ("tools[2].function.parameters", "tools[2].parameters"),
        ("tools", "tools"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("max_tokens", "max_output_tokens"),
        ("model", "model"),
    ],
)
def test_fields_of_the_chat_have_their_names_in_the_body(param: str, shown: str) -> None:
    assert responses_param(param) == shown
