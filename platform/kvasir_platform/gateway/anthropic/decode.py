"""Decodes bodies of the Messages API strictly, with errors that name the invalid field.

A server tool or a block that needs one is refused by its name, because a client that offers it relies on it;
so are documents, audio and videos, and images in results of tools.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.anthropic.schema import (
    CountTokensBody,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesBody,
    NamedToolChoice,
    PromptFields,
    RedactedThinkingBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvasir_platform.gateway.openai.schema.decode import decode_body, refuse_not_served
from kvasir_platform.gateway.openai.schema.limits import bad, check_depth, check_references, unsupported

_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountTokensBody)
_ASSISTANTS = (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)
_USERS = (ImageBlock, ToolResultBlock)

_Body = TypeVar("_Body", bound=PromptFields)


class _OfferedTool(Struct):
    type: Any = None


class _OfferedTools(Struct):
    """What is read of an invalid body, to name a server tool in it."""

    tools: list[_OfferedTool] | None = None


class _SentMessage(Struct):
    content: Any = None


class _SentMessages(Struct):
    """What is read of an invalid body, to name a kind of media in it."""

    messages: list[_SentMessage] | None = None


_SENT = msgspec.json.Decoder(_SentMessages)
_NOT_IN_MESSAGES = ("audio", "video", "input_audio", "audio_url", "video_url")
_OFFERED = msgspec.json.Decoder(_OfferedTools)


def decode_messages(body: bytes) -> MessagesBody:
    """Decode and check a request for a message. Raise RequestError with `param` and a code."""
    return _checked(_MESSAGES, body)


def decode_count(body: bytes) -> CountTokensBody:
    """Decode and check a request to count tokens. Raise RequestError with `param` and a code."""
    return _checked(_COUNT, body)


def _checked(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        decoded = decode_body(decoder, body)
    except RequestError:
        _refuse_server_tools(body)
        _refuse_media(body)
        raise
    refuse_not_served(decoded)
    for i, message in enumerate(decoded.messages):
        if not isinstance(message.content, str):
            _check_blocks(message, i)
    _check_tools(decoded)
    return decoded


def _refuse_server_tools(body: bytes) -> None:
    """Raise RequestError if an invalid body offers a tool that Anthropic defines."""
    try:
        offered = _OFFERED.decode(body).tools
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return
    for i, tool in enumerate(offered or ()):
        if isinstance(tool.type, str) and tool.type != "custom":
            raise unsupported(
                f"tools[{i}].type",
                f"The tool {tool.type[:64]!r} is defined by Anthropic and not served here: describe it as a "
                "tool of your own, with name and input_schema.",
            )


def _refuse_media(body: bytes) -> None:
    """Raise RequestError if an invalid body has audio or a video, of which Anthropic's API has none."""
    try:
        sent = _SENT.decode(body).messages
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return
    for i, message in enumerate(sent or ()):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in _NOT_IN_MESSAGES:
                raise RequestError(
                    f"The Messages API has no {kind}: Anthropic defines text and images only. Send it to "
                    "/v1/chat/completions, to a model that takes it.",
                    code="unsupported_modality",
                    param=f"messages[{i}].content[{j}].type",
                )


def _check_tools(body: PromptFields) -> None:
    tools = body.tools or ()
    for i, tool in enumerate(tools):
        check_depth(tool.input_schema, f"tools[{i}].input_schema")
        check_references(tool.input_schema, f"tools[{i}].input_schema")
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice) and choice.name not in [tool.name for tool in tools]:
        raise bad(f"tools has no tool {choice.name!r}.", "tool_choice.name")


def _check_blocks(message: InputMessage, number: int) -> None:
    for i, block in enumerate(message.content):
        where = f"messages[{number}].content[{i}]"
        if isinstance(block, DocumentBlock):
            raise _text_only(block, where)
        if isinstance(block, _USERS) and message.role != "user":
            kind = block.__struct_config__.tag
            raise bad(f"{kind} is allowed in messages of the user only.", f"{where}.type")
        if isinstance(block, ToolResultBlock):
            for j, part in enumerate(block.content or ()):
                if isinstance(part, ImageBlock | DocumentBlock):
                    raise _text_only(part, f"{where}.content[{j}]")
        elif isinstance(block, _ASSISTANTS):
            if message.role != "assistant":
                kind = block.__struct_config__.tag
                raise bad(f"{kind} is allowed in messages of the assistant only.", f"{where}.type")
            if isinstance(block, ToolUseBlock):
                check_depth(block.input, f"{where}.input")


def _text_only(block: ImageBlock | DocumentBlock, where: str) -> RequestError:
    kind = "image" if isinstance(block, ImageBlock) else "document"
    return RequestError(
        f"Only text is supported, not {kind}.", code="unsupported_modality", param=f"{where}.type"
    )
