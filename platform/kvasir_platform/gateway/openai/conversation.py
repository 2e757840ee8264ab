"""Converts the messages of a chat to the form that chat templates expect.

Clients send what OpenAI's API accepts and what it returned before; templates expect the form of transformers
and vLLM: arguments of calls as objects, tool results as one string, reasoning under both of its names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvasir_platform.gateway.http.json_size import JsonTexts
from kvasir_platform.gateway.openai.schema.chat import ContentPart, FunctionCalled, Message
from kvasir_platform.gateway.openai.schema.limits import MAX_DEPTH, check_depth

TemplateMessage = dict[str, Any]

_SHOWN = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
"""What chat templates call the parts of media."""


def template_messages(messages: Sequence[Message]) -> list[TemplateMessage]:
    """Return `messages` for a chat template. Raise RequestError for arguments that nest too deep or have too
    many values."""
    texts = JsonTexts()
    return [_template_message(message, i, texts) for i, message in enumerate(messages)]


def _template_message(message: Message, number: int, texts: JsonTexts) -> TemplateMessage:
    role = message.role
    if role == "assistant":
        return _assistants(message, number, texts)
    shown: TemplateMessage = {
        "role": "tool" if role == "function" else role,
        "content": _content(message.content),
    }
    if role in ("tool", "function"):
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        if isinstance(shown["content"], list):
            shown["content"] = "\n".join(part["text"] for part in shown["content"])
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _assistants(message: Message, number: int, texts: JsonTexts) -> TemplateMessage:
    content = message.content if message.content is not None else message.refusal
    shown: TemplateMessage = {"role": "assistant", "content": _content(content)}
    if message.tool_calls or message.function_call is not None:
        shown["tool_calls"] = _calls(message, f"messages[{number}]", texts)
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        shown["reasoning"] = shown["reasoning_content"] = reasoning
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _content(content: str | list[ContentPart] | None) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    return [
        {"type": "text", "text": part.text or part.refusal or ""}
        if (shown := _SHOWN.get(part.type)) is None
        else {"type": shown}
        for part in content
    ]


def _calls(message: Message, path: str, texts: JsonTexts) -> list[dict[str, Any]]:
    calls = [
        _call(call.id, call.function, f"{path}.tool_calls[{i}]", texts)
        for i, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None:
        calls.append(_call(f"call_{message.function_call.name}", message.function_call, path, texts))
    return calls


def _call(call_id: str, function: FunctionCalled, path: str, texts: JsonTexts) -> dict[str, Any]:
    arguments = function.arguments
    if isinstance(arguments, str):
        texts.add(arguments)
    parsed = called_with(arguments) if isinstance(arguments, str) else arguments or {}
    check_depth(parsed, f"{path}.function.arguments", MAX_DEPTH)
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": parsed}}


def called_with(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Invalid JSON of the model, such as that of a call which
    the output limit has cut short, becomes an empty object, as in vLLM: it is part of the conversation, and
    refusing it would refuse every further turn."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
