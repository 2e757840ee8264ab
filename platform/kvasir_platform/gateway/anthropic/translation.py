"""Translates a body of the Messages API to the chat that it means.

The conversation becomes what chat templates expect: one turn for consecutive messages of one role, results of
tools as messages of their own before the user's text, and thinking as reasoning. Nothing here depends on a
model but whether it reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvasir_platform.gateway.anthropic.schema import (
    AnyToolChoice,
    ClientTool,
    CountTokensBody,
    ImageBlock,
    InputBlock,
    InputMessage,
    MessagesBody,
    NamedToolChoice,
    NoToolChoice,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from kvasir_platform.gateway.openai.schema.chat import (
    ChatBody,
    ContentPart,
    Function,
    FunctionCalled,
    ImageUrl,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from kvasir_platform.gateway.openai.schema.structured import JsonSchemaFormat, NamedSchema

_BILLING = "x-anthropic-billing-header"
"""Begins a block that coding agents put before their instructions, with a hash for each request: no prompt
with it would be in a cache."""


def chat_body(body: MessagesBody, *, reasoning: bool) -> ChatBody:
    """Return the chat of a request. `reasoning`: whether the model's reasoning can be told from its answer,
    without which a budget for it is ignored."""
    return ChatBody(
        **_prompt(body, reasoning=reasoning),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        user=None if body.metadata is None else body.metadata.user_id,
    )


def counted_chat(body: CountTokensBody, *, reasoning: bool) -> ChatBody:
    """Return the chat whose prompt is counted."""
    return ChatBody(**_prompt(body, reasoning=reasoning))


def _prompt(body: PromptFields, *, reasoning: bool) -> dict[str, Any]:
    """Return the fields of the chat that its prompt and the form of its output depend on."""
    choice = body.tool_choice
    last = body.messages[-1]
    return {
        "model": body.model,
        "messages": _conversation(body),
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _choice(body) if body.tools else None,
        "parallel_tool_calls": not getattr(choice, "disable_parallel_tool_use", None),
        "response_format": _format(body),
        "continue_final_message": (last.role == "assistant" and _ends_with_text(last)) or None,
        **_thinking(body, reasoning=reasoning),
    }


def _conversation(body: PromptFields) -> list[Message]:
    made: list[Message] = []
    system = [body.system] if isinstance(body.system, str) else [each.text for each in body.system or ()]
    if texts := [text for text in system if text and not text.startswith(_BILLING)]:
        made.append(Message(role="system", content=_content(texts)))
    for role, blocks in _turns(body.messages):
        if role == "assistant":
            made.append(_assistants(blocks))
        elif role == "user":
            made += _users(blocks)
        else:
            # Templates that require one system message at the beginning get these joined to it.
            made.append(Message(role="developer", content=_content(_texts(blocks))))
    return made


def _turns(messages: Sequence[InputMessage]) -> list[tuple[str, list[InputBlock]]]:
    """Return the roles and blocks of the turns: templates may insist that roles alternate."""
    turns: list[tuple[str, list[InputBlock]]] = []
    for message in messages:
        content = message.content
        blocks: list[InputBlock] = [TextBlock(text=content)] if isinstance(content, str) else content
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, [*blocks]))
    return turns


def _users(blocks: Sequence[InputBlock]) -> list[Message]:
    """Return the results of tools, which follow the calls directly, and then what the user says."""
    made = [
        Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block))
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    parts = [
        ContentPart(type="image_url", image_url=ImageUrl(url=_image_url(block)))
        if isinstance(block, ImageBlock)
        else ContentPart(type="text", text=block.text)
        for block in blocks
        if isinstance(block, ImageBlock | TextBlock)
    ]
    texts = _texts(blocks)
    said = parts if len(texts) < len(parts) else _content(texts)
    return [*made, Message(role="user", content=said)] if parts or not made else made


def _image_url(block: ImageBlock) -> str:
    source = block.source
    if isinstance(source, UrlSource):
        return source.url
    return f"data:{source.media_type};base64,{source.data}"


def _assistants(blocks: Sequence[InputBlock]) -> Message:
    reasoning = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(id=block.id, function=FunctionCalled(name=block.name, arguments=block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return Message(
        role="assistant",
        content=_content(_texts(blocks)),
        reasoning_content="".join(reasoning) or None,
        tool_calls=calls or None,
    )


def _texts(blocks: Sequence[InputBlock]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]


def _content(texts: Sequence[str]) -> str | list[ContentPart]:
    """Return one text as it is: it is what the model wrote or will see, without separators."""
    if len(texts) <= 1:
        return "".join(texts)
    return [ContentPart(type="text", text=text) for text in texts]


def _result(block: ToolResultBlock) -> str:
    content = block.content
    if not isinstance(content, str):
        parts = [
            part.tool_name if isinstance(part, ToolReferenceBlock) else part.text
            for part in content or ()
            if isinstance(part, TextBlock | ToolReferenceBlock)
        ]
        content = "\n".join(parts)
    return f"Error: {content}" if block.is_error else content


def _ends_with_text(message: InputMessage) -> bool:
    content = message.content
    return bool(content) and (isinstance(content, str) or isinstance(content[-1], TextBlock))


def _tool(tool: ClientTool) -> Tool:
    return Tool(
        function=Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
    )


def _choice(body: PromptFields) -> Any:
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return NamedTool(function=NamedFunction(choice.name))
    if isinstance(choice, AnyToolChoice):
        return "required"
    return "none" if isinstance(choice, NoToolChoice) else "auto"


def _format(body: PromptFields) -> JsonSchemaFormat | None:
    wanted = body.output_format if body.output_config is None else body.output_config.format
    return None if wanted is None else JsonSchemaFormat(NamedSchema(name="output", schema=wanted.schema))


def _thinking(body: PromptFields, *, reasoning: bool) -> dict[str, Any]:
    thinking = body.thinking
    if isinstance(thinking, ThinkingDisabled):
        return {"reasoning_effort": "none", "include_reasoning": False}
    made: dict[str, Any] = {}
    if body.output_config is not None:
        made["reasoning_effort"] = body.output_config.effort
    if thinking is not None and thinking.display == "omitted":
        made["include_reasoning"] = False
    if isinstance(thinking, ThinkingEnabled):
        made["chat_template_kwargs"] = {"enable_thinking": True}
        made["thinking_token_budget"] = thinking.budget_tokens if reasoning else None
    return made
