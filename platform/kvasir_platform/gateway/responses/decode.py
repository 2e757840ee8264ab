"""Decodes bodies of the Responses API strictly, with errors that name the invalid field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.openai.schema.decode import decode_body, refuse_not_served
from kvasir_platform.gateway.openai.schema.limits import bad, missing, unsupported
from kvasir_platform.gateway.responses.body import InputItem, InputPart, ResponsesBody, ResponseTool

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MODALITIES = ("input_file",)
MEDIA_PARTS = {"input_image": "image_url", "input_audio": "input_audio", "input_video": "video_url"}
"""The field with the file of each type of part that is no text."""
_SENT = {"input_image": "Images", "input_audio": "Audio files", "input_video": "Videos"}
_NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
"""The types of items that are served, and the fields that each needs."""
_TOOLS = ("function",)
_CHOICES = ("function", "allowed_tools")
_INCLUDED = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Those of things that this server never returns change nothing."""
_BODY = msgspec.json.Decoder(ResponsesBody)


class _Typed(Struct):
    """Anything that has a type."""

    type: str | None = None
    content: Any = None


class _Types(Struct):
    """The types in a body, whatever else it holds."""

    input: str | list[_Typed] = ""
    tools: list[_Typed] | None = None
    tool_choice: str | _Typed | None = None


_TYPES = msgspec.json.Decoder(_Types)
_ITEM_LIST = msgspec.json.Decoder(list[InputItem])


def decode_responses(body: bytes) -> ResponsesBody:
    """Decode and check a request. Raise RequestError with `param` and a code."""
    try:
        asked = decode_body(_BODY, body)
    except RequestError:
        _refuse_types(body)
        raise
    refuse_not_served(asked)
    if asked.text is not None:
        refuse_not_served(asked.text, "text")
    if asked.reasoning is not None:
        refuse_not_served(asked.reasoning, "reasoning")
    if asked.structured_outputs is not None:
        refuse_not_served(asked.structured_outputs, "structured_outputs")
    for i, tool in enumerate(asked.tools or ()):
        _check_tool(tool, f"tools[{i}]")
    _check_choice(asked)
    if not isinstance(asked.input, str):
        for i, item in enumerate(asked.input):
            _check_item(item, i)
    _check_options(asked)
    return asked


def decode_items(items: bytes) -> list[InputItem]:
    """Decode items that were checked before. Raise msgspec.MsgspecError for others."""
    return _ITEM_LIST.decode(items)


def item_type(item: InputItem) -> str:
    """Return the type of an item: a message needs none."""
    return item.type or ("message" if item.role is not None else "item_reference")


def _refuse_types(body: bytes) -> None:
    """Raise RequestError for a type that is not served: its fields, which are unknown here, say less."""
    try:
        found = _TYPES.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(found.input, str):
        for i, item in enumerate(found.input):
            if item.type is not None:
                _check_type(item.type, tuple(_NEEDED), "Items", f"input[{i}].type")
            for j, part in enumerate(_parts_in(item.content)):
                _check_modality(part, f"input[{i}].content[{j}].type")
    for i, tool in enumerate(found.tools or ()):
        _check_type(tool.type or "", _TOOLS, "Tools", f"tools[{i}].type")
    if isinstance(found.tool_choice, _Typed):
        _check_type(found.tool_choice.type or "", _CHOICES, "Tool choices", "tool_choice.type")


def _parts_in(content: object) -> Iterator[str]:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        yield kind if isinstance(kind, str) else ""


def _check_type(kind: str, served: Sequence[str], what: str, param: str) -> None:
    if kind not in served:
        raise _not_served(kind, served, what, param)


def _not_served(kind: str, served: Sequence[str], what: str, param: str) -> RequestError:
    if not kind:
        return missing(param)
    return unsupported(
        param, f"{what} of type {kind[:64]!r} are not supported by this server; send {' or '.join(served)}."
    )


def _check_modality(kind: str, param: str) -> None:
    if kind in _MODALITIES:
        raise RequestError(
            f"Text, images, videos and audio are supported, not {kind}.",
            code="unsupported_modality",
            param=param,
        )


def _check_tool(tool: ResponseTool, where: str) -> None:
    _check_type(tool.type, _TOOLS, "Tools", f"{where}.type")
    refuse_not_served(tool, where)


def _check_choice(asked: ResponsesBody) -> None:
    choice = asked.tool_choice
    if choice is None or isinstance(choice, str):
        return
    _check_type(choice.type, _CHOICES, "Tool choices", "tool_choice.type")
    if choice.type == "function":
        if choice.name is None:
            raise missing("tool_choice.name")
        return
    if choice.mode is None:
        raise missing("tool_choice.mode")
    if not choice.tools:
        raise missing("tool_choice.tools")
    known = {tool.name for tool in asked.tools or ()}
    for i, tool in enumerate(choice.tools):
        if tool.get("type") != "function" or tool.get("name") not in known:
            raise bad("tool_choice.tools names a tool that is not in tools.", f"tool_choice.tools[{i}]")


def _check_item(item: InputItem, number: int) -> None:
    kind = item_type(item)
    needed = _NEEDED.get(kind)
    if needed is None:
        raise _not_served(kind, tuple(_NEEDED), "Items", f"input[{number}].type")
    if item.namespace is not None:
        refuse_not_served(item, f"input[{number}]")
    for name in needed:
        if getattr(item, name) is None:
            raise missing(f"input[{number}].{name}")
    if type(item.content) is list:
        _check_parts(item.content, f"input[{number}].content", media=item.role == "user")
    if type(item.output) is list:
        _check_parts(item.output, f"input[{number}].output")
    if item.summary is not None:
        _check_parts(item.summary, f"input[{number}].summary")


def _check_parts(parts: Sequence[InputPart], where: str, *, media: bool = False) -> None:
    for i, part in enumerate(parts):
        at = f"{where}[{i}]"
        kind = part.type
        for wanted, name in MEDIA_PARTS.items():
            if kind != wanted and getattr(part, name) is not None:
                raise bad(f"{name} is allowed in parts of type {wanted} only.", f"{at}.{name}")
        if kind in MEDIA_PARTS:
            if not media:
                raise bad(f"{_SENT[kind]} are allowed in messages of the user only.", f"{at}.type")
            refuse_not_served(part, at)
            if getattr(part, MEDIA_PARTS[kind]) is None:
                raise missing(f"{at}.{MEDIA_PARTS[kind]}")
            continue
        field = "text" if kind in TEXT_PARTS else "refusal" if kind == "refusal" else None
        if field is None:
            _check_modality(kind, f"{at}.type")
            raise bad(f"Unknown content part {kind[:64]!r}.", f"{at}.type")
        refuse_not_served(part, at)
        if getattr(part, field) is None:
            raise missing(f"{at}.{field}")


def _check_options(asked: ResponsesBody) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise bad("stream_options needs stream: true.", "stream_options")
    for i, name in enumerate(asked.include or ()):
        if name not in _INCLUDED:
            raise bad(f"include has no {name[:64]!r}; it has {', '.join(_INCLUDED)}.", f"include[{i}]")
    form = None if asked.text is None else asked.text.format
    if asked.structured_outputs is not None and form is not None and form.__struct_config__.tag != "text":
        raise bad("text.format and structured_outputs both constrain the output; send one.", "text.format")
