"""Converts a body of the Responses API to a chat, so that both take one path.

Items become messages: reasoning, text and calls that the model produced in one turn are one message of the
assistant, as chat templates expect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvasir_platform.gateway.openai.schema.chat import (
    ChatBody,
    ContentPart,
    Function,
    FunctionCalled,
    ImageUrl,
    MediaUrl,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from kvasir_platform.gateway.openai.schema.limits import MAX_CALLS, MAX_MESSAGES, bad
from kvasir_platform.gateway.openai.schema.sampling import CommonFields
from kvasir_platform.gateway.openai.schema.structured import (
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
)
from kvasir_platform.gateway.responses.body import (
    ChosenTool,
    InputItem,
    InputPart,
    ResponsesBody,
    SchemaFormat,
)
from kvasir_platform.gateway.responses.decode import MEDIA_PARTS, item_type

_PARAMS = (
    (re.compile(r"^messages\[\d+\].*$|^messages$"), "input"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^(?:max_completion_tokens|max_tokens)$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^truncate_prompt_tokens$"), "truncation"),
)


def chat_body(asked: ResponsesBody, earlier: Sequence[InputItem] = (), *, default_output: int) -> ChatBody:
    """Return the chat of a body that follows the items of `earlier` responses. `default_output` is the output
    limit of a request without one, for which truncation leaves room. Raise RequestError for a conversation
    that is too long."""
    truncates = asked.truncation == "auto"
    limit = asked.max_output_tokens
    common = {name: getattr(asked, name) for name in CommonFields.__struct_fields__}
    return ChatBody(
        **{**common, "user": asked.user or asked.safety_identifier},
        messages=_messages(asked.instructions, [*earlier, *input_items(asked)]),
        max_completion_tokens=default_output if truncates and limit is None else limit,
        logprobs=True if asked.wants_logprobs else None,
        top_logprobs=asked.top_logprobs if asked.wants_logprobs else None,
        tools=_tools(asked),
        tool_choice=_tool_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_response_format(asked),
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        chat_template_kwargs=asked.chat_template_kwargs,
        truncate_prompt_tokens=-1 if truncates else None,
    )


def input_items(asked: ResponsesBody) -> list[InputItem]:
    """Return the input as items."""
    if isinstance(asked.input, str):
        return [InputItem(type="message", role="user", content=asked.input)]
    return asked.input


def responses_param(param: str) -> str:
    """Return the field of a Responses body from which that field of a chat was made."""
    for pattern, name in _PARAMS:
        param, found = pattern.subn(name, param)
        if found:
            break
    return param


@dataclass(slots=True)
class _Turn:
    """What the model produced in one turn, while it is gathered."""

    reasoning: list[str] = field(default_factory=list)
    content: str | list[ContentPart] | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """Return it as one message; none if nothing is left of it: reasoning that only its provider can
        read."""
        if self.content is None and not self.calls and not self.reasoning:
            return []
        return [
            Message(
                role="assistant",
                content=self.content,
                reasoning_content="\n".join(self.reasoning) if self.reasoning else None,
                tool_calls=self.calls or None,
            )
        ]


def _messages(instructions: str | None, items: Iterable[InputItem]) -> list[Message]:
    made: list[Message] = [Message(role="system", content=instructions)] if instructions else []
    turn: _Turn | None = None
    for item in items:
        kind = item_type(item)
        if kind in ("reasoning", "function_call") or item.role == "assistant":
            if turn is not None and _begins_turn(turn, kind):
                made += turn.messages()
                turn = None
            turn = turn or _Turn()
            _add(turn, item, kind)
            continue
        made += turn.messages() if turn else []
        turn = None
        if kind == "function_call_output":
            made.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        else:
            made.append(Message(role=item.role or "user", content=_content(item.content)))
    made += turn.messages() if turn else []
    if not made:
        raise bad("input has no message.", "input")
    if len(made) > MAX_MESSAGES:
        raise bad(f"The conversation has {len(made)} messages; {MAX_MESSAGES} are allowed.", "input")
    return _one_system_message(made)


def _begins_turn(turn: _Turn, kind: str) -> bool:
    if kind == "function_call":
        return len(turn.calls) >= MAX_CALLS
    return turn.content is not None or bool(turn.calls)


def _add(turn: _Turn, item: InputItem, kind: str) -> None:
    if kind == "reasoning":
        if text := _text(item.content) or _text(item.summary):
            turn.reasoning.append(text)
    elif kind == "function_call":
        called = FunctionCalled(name=item.name or "", arguments=item.arguments)
        turn.calls.append(ToolCall(id=item.call_id or "", function=called))
    else:
        turn.content = _content(item.content)


def _one_system_message(messages: list[Message]) -> list[Message]:
    """Join the system and developer messages at the beginning: many templates take one at most."""
    leading = 0
    while leading < len(messages) and messages[leading].role in ("system", "developer"):
        leading += 1
    if leading < 2:
        return messages
    text = "\n\n".join(_plain(message) for message in messages[:leading])
    return [Message(role="system", content=text), *messages[leading:]]


def _plain(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


def _content(content: str | list[InputPart] | None) -> str | list[ContentPart]:
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) == 1 and content[0].type not in MEDIA_PARTS:
        return content[0].text or content[0].refusal or ""
    return [_part(part) for part in content]


def _part(part: InputPart) -> ContentPart:
    if part.image_url is not None:
        return ContentPart(type="image_url", image_url=ImageUrl(url=part.image_url))
    if part.video_url is not None:
        return ContentPart(type="video_url", video_url=MediaUrl(url=part.video_url))
    if part.input_audio is not None:
        return ContentPart(type="input_audio", input_audio=part.input_audio)
    if part.type == "refusal":
        return ContentPart(type="refusal", refusal=part.refusal)
    return ContentPart(type="text", text=part.text)


def _text(content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


def _tools(asked: ResponsesBody) -> list[Tool] | None:
    if asked.tools is None:
        return None
    tools = asked.tools
    choice = asked.tool_choice
    if isinstance(choice, ChosenTool) and choice.type == "allowed_tools":
        allowed = {each.get("name") for each in choice.tools or ()}
        tools = [tool for tool in tools if tool.name in allowed]
    return [
        Tool(
            function=Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
        for tool in tools
    ]


def _tool_choice(
    choice: Literal["none", "auto", "required"] | ChosenTool | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    if isinstance(choice, ChosenTool):
        if choice.type == "function":
            return NamedTool(function=NamedFunction(choice.name or ""))
        return choice.mode
    return choice


def _response_format(asked: ResponsesBody) -> ResponseFormat | None:
    form = None if asked.text is None else asked.text.format
    if isinstance(form, SchemaFormat):
        return JsonSchemaFormat(
            NamedSchema(name=form.name, schema=form.schema, description=form.description, strict=form.strict)
        )
    return form
