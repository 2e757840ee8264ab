"""A request for a message becomes the chat that it means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir_platform.gateway.anthropic.decode import decode_count, decode_messages
from kvasir_platform.gateway.anthropic.translation import chat_body, counted_chat
from kvasir_platform.gateway.openai.conversation import template_messages
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.structured import JsonSchemaFormat

TOOLS = [
    {"name": "weather", "description": "Asks.", "input_schema": {"type": "object"}, "strict": True},
    {"name": "tides", "input_schema": {"type": "object"}},
]


def translated(*messages: Any, reasoning: bool = True, **fields: Any) -> ChatBody:
    shown = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    sent = {"model": "m", "max_tokens": 8, "messages": shown or [{"role": "user", "content": "hi"}], **fields}
    return chat_body(decode_messages(json.dumps(sent).encode()), reasoning=reasoning)


def conversation(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages as a chat template gets them."""
    return template_messages(translated(*messages, **fields).messages)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def use(name: str, call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {"city": "Oslo"}}


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def test_the_fields_of_sampling_keep_their_meaning() -> None:
    chat = translated(
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stream=True,
        metadata={"user_id": "u"},
    )
    assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (
        8,
        ["END"],
        0.5,
        0.9,
        40,
    )
    assert chat.stream
    assert chat.session == "u"


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.")], "Be brief."),
        ([text("Be"), text("brief.")], [text("Be"), text("brief.")]),
        ([text("x-anthropic-billing-header: cch=1a2b"), text("Be brief.")], "Be brief."),
    ],
)
def test_the_system_prompt_comes_first(system: Any, shown: Any) -> None:
    assert conversation(system=system)[0] == {"role": "system", "content": shown}


@pytest.mark.parametrize("system", [None, "", [], [text("x-anthropic-billing-header: cch=1a2b")]])
def test_without_a_system_prompt_there_is_no_system_message(system: Any) -> None:
    assert conversation(system=system) == [{"role": "user", "content": "hi"}]


def test_results_of_tools_follow_the_calls_and_precede_what_the_user_says() -> None:
    shown = conversation(
        "Weather and tides?",
        assistant(
            {"type": "thinking", "thinking": "Two calls.", "signature": "s"},
            text("Let me see."),
            use("weather", "a"),
            use("tides", "b"),
        ),
        user(text("Here."), result("b", "high"), result("a", [text("sunny"), text("20 °C")])),
        tools=TOOLS,
    )
    called = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert shown[1]["content"] == "Let me see."
    assert shown[1]["reasoning"] == "Two calls."
    assert shown[1]["tool_calls"][0] == {"id": "a", "type": "function", "function": called}
    assert shown[2:] == [
        {"role": "tool", "content": "high", "tool_call_id": "b"},
        {"role": "tool", "content": "sunny\n20 °C", "tool_call_id": "a"},
        {"role": "user", "content": "Here."},
    ]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (result("a", "no such city", is_error=True), "Error: no such city"),
        (result("a", None), ""),
        (result("a", [text("Found:"), {"type": "tool_reference", "tool_name": "tides"}]), "Found:\ntides"),
        ({"type": "tool_result", "tool_use_id": "a"}, ""),
    ],
)
def test_a_result_says_whether_it_is_an_error(sent: Any, shown: str) -> None:
    made = conversation("x", assistant(use("f", "a")), user(sent))
    assert made[2:] == [{"role": "tool", "content": shown, "tool_call_id": "a"}]


def test_consecutive_messages_of_a_role_are_one_turn() -> None:
    shown = conversation(
        "a", "b", assistant(text("c")), assistant(use("f", "1")), user(result("1", "d")), "e"
    )
    assert [each["role"] for each in shown] == ["user", "assistant", "tool", "user"]
    assert shown[0]["content"] == [text("a"), text("b")]
    assert shown[1]["tool_calls"]


def test_a_system_message_within_the_conversation_is_a_developers() -> None:
    shown = conversation("a", {"role": "system", "content": "Be brief."}, "b")
    assert shown[1] == {"role": "developer", "content": "Be brief."}


def test_an_answer_continues_the_final_text_of_the_assistant() -> None:
    assert translated("The sun?", assistant(text("It is ("))).continue_final_message
    assert not translated("The sun?").continue_final_message
    assert not translated("x", assistant(use("f", "a"))).continue_final_message


@pytest.mark.parametrize(
    ("choice", "shown", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
    ],
)
def test_a_choice_of_tools_keeps_its_meaning(choice: Any, shown: str, parallel: bool) -> None:
    chat = translated(tools=TOOLS, tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (shown, parallel)
    assert chat.tools is not None
    assert (chat.tools[0].function.name, chat.tools[0].function.strict) == ("weather", True)


def test_a_named_tool_is_forced() -> None:
    choice = translated(tools=TOOLS, tool_choice={"type": "tool", "name": "tides"}).tool_choice
    assert choice is not None
    assert not isinstance(choice, str)
    assert choice.function.name == "tides"


def test_without_tools_a_choice_means_nothing() -> None:
    assert translated(tool_choice={"type": "auto"}).tool_choice is None


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none", "include_reasoning": False}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"include_reasoning": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"thinking_token_budget": 1024, "chat_template_kwargs": {"enable_thinking": True}},
        ),
    ],
)
def test_thinking_becomes_reasoning(fields: Any, shown: Any) -> None:
    chat = translated(**fields)
    names = ("reasoning_effort", "include_reasoning", "thinking_token_budget", "chat_template_kwargs")
    assert {name: value for name in names if (value := getattr(chat, name)) is not None} == shown


def test_a_model_that_does_not_reason_ignores_a_budget_for_it() -> None:
    chat = translated(reasoning=False, thinking={"type": "enabled", "budget_tokens": 1024})
    assert chat.thinking_token_budget is None


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_schema_of_the_output_is_enforced(place: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    fields: dict[str, Any] = {place: {"format": wanted} if place == "output_config" else wanted}
    chat = translated(**fields)
    assert isinstance(chat.response_format, JsonSchemaFormat)
    assert chat.response_format.json_schema.schema == {"type": "object"}


def test_a_count_has_the_prompt_of_the_message() -> None:
    shared = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "system": "Be brief.",
        "tools": TOOLS,
        "thinking": {"type": "disabled"},
    }
    counted = counted_chat(decode_count(json.dumps(shared).encode()), reasoning=True)
    asked = chat_body(decode_messages(json.dumps({**shared, "max_tokens": 8}).encode()), reasoning=True)
    for name in ("messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"):
        assert getattr(counted, name) == getattr(asked, name)
