"""Bodies of the Messages API: what is accepted, and what is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.anthropic.decode import decode_count, decode_messages

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
NAMED = {"type": "tool", "name": "g"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 8, "messages": USER, **fields}).encode()


def said(*blocks: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}]


def test_what_coding_agents_send_is_accepted() -> None:
    cached = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    decoded = decode_messages(
        body(
            system=[{"type": "text", "text": "Be brief.", "cache_control": cached}],
            messages=[
                *said({"type": "text", "text": "hi", "cache_control": cached, "citations": None}),
                *said(
                    {"type": "thinking", "thinking": "hm", "signature": "x" * 5000},
                    {"type": "redacted_thinking", "data": "opaque"},
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "f",
                        "input": {},
                        "caller": {"type": "direct"},
                    },
                    role="assistant",
                ),
                *said({"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False}),
            ],
            tools=[
                {
                    **TOOL,
                    "type": "custom",
                    "cache_control": cached,
                    "eager_input_streaming": True,
                    "defer_loading": False,
                    "input_examples": [{"a": 1}],
                    "allowed_callers": ["direct"],
                }
            ],
            tool_choice={"type": "auto", "disable_parallel_tool_use": False},
            thinking={"type": "adaptive", "display": "summarized"},
            output_config={"effort": "high"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            metadata={"user_id": "user_1_session_2"},
            service_tier="auto",
            speed="standard",
            mcp_servers=[],
            container=None,
            stream=True,
        )
    )
    assert decoded.stream
    assert len(decoded.messages) == 3


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": None}, "invalid_type", "max_tokens"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"messages": said({"type": "txt", "text": "x"})}, "invalid_value", "messages[0].content[0].type"),
        ({"messages": said({"text": "x"})}, "missing_parameter", "messages[0].content[0].type"),
        ({"messages": said({"type": "text"})}, "missing_parameter", "messages[0].content[0].text"),
        ({"messages": said({"type": "image"})}, "missing_parameter", "messages[0].content[0].source"),
        (
            {"messages": [{"role": "assistant", "content": [IMAGE]}]},
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (
            {"messages": said({"type": "document", "source": {"type": "text", "data": "x"}, "title": "t"})},
            "unsupported_modality",
            "messages[0].content[0].type",
        ),
        (
            {"messages": said({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]})},
            "unsupported_modality",
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": said({"type": "tool_use", "id": "a", "name": "f", "input": {}})},
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (
            {"messages": said({"type": "tool_result", "tool_use_id": "a"}, role="assistant")},
            "invalid_value",
            "messages[0].content[0].type",
        ),
        ({"speed": "fast"}, "unsupported_parameter", "speed"),
        ({"container": "c"}, "unsupported_parameter", "container"),
        ({"mcp_servers": [{"type": "url"}]}, "unsupported_parameter", "mcp_servers"),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
            "unsupported_parameter",
            "tools[1].type",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "missing_parameter", "tools[0].input_schema"),
        ({"tools": [{**TOOL, "extra": 1}]}, "unknown_parameter", "tools[0].extra"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "invalid_value",
            "tool_choice.name",
        ),
        ({"tool_choice": NAMED}, "invalid_value", "tool_choice.name"),
        (
            {"tools": [{"name": "f", "input_schema": {"$ref": "https://x/y.json"}}]},
            "invalid_value",
            "tools[0].input_schema",
        ),
        ({"thinking": {"type": "enabled"}}, "missing_parameter", "thinking.budget_tokens"),
        ({"top_p": 0}, "invalid_value", "top_p"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_messages(body(**fields))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_server_tool_is_refused_by_its_name() -> None:
    with pytest.raises(RequestError, match="web_search_20250305"):
        decode_messages(body(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]))


def test_max_tokens_is_required_for_a_message_and_unknown_for_a_count() -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        decode_messages(json.dumps({"model": "m", "messages": USER}).encode())
    decode_count(json.dumps({"model": "m", "messages": USER, "thinking": {"type": "disabled"}}).encode())
    with pytest.raises(RequestError, match="max_tokens"):
        decode_count(body())


@pytest.mark.parametrize("data", [b"{", b'{"tools": [[]]}', b'{"tools": 1}', b"[" * 5000, b"\xff"])
def test_what_is_no_body_is_an_error_of_the_request(data: bytes) -> None:
    with pytest.raises(RequestError):
        decode_messages(data)
