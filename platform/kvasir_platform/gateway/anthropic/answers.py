"""What the Messages API answers: messages, the events of a stream, counts and models.

These types encode the answers and are what the OpenAPI document shows; only events that carry nothing but
text are written as bytes.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from kvasir.core.requests import FinishReason, Usage
from kvasir_platform.gateway.openai.answer import AnswerHead

_encode = msgspec.json.Encoder().encode

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "refusal", "stop_sequence", "tool_use"
]


class TextOutput(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingOutput(Struct, tag_field="type", tag="thinking"):
    """Reasoning. `signature` is the message's id: clients send it back, and it is not verified."""

    thinking: str
    signature: str


class ToolUseOutput(Struct, tag_field="type", tag="tool_use"):
    """A call that the client executes."""

    id: str
    name: str
    input: dict[str, Any]


OutputBlock: TypeAlias = TextOutput | ThinkingOutput | ToolUseOutput


class ThinkingTokens(Struct):
    """Reasoning tokens of the output."""

    thinking_tokens: int


class MessageUsage(Struct, omit_defaults=True):
    """Tokens of a call. `input_tokens` are those that were computed and not read from a cache. Caching is
    automatic and free, so that nothing counts as written to it."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None


class MessageAnswer(Struct, tag_field="type", tag="message"):
    """The answer. In the first event of a stream it has no content and no `stop_reason`."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event of a stream."""

    message: MessageAnswer


class PingEvent(Struct, tag_field="type", tag="ping"):
    """An event without content."""


class ContentBlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: OutputBlock


class TextPiece(Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingPiece(Struct, tag_field="type", tag="thinking_delta"):
    """More of the reasoning."""

    thinking: str


class SignaturePiece(Struct, tag_field="type", tag="signature_delta"):
    """The signature of the reasoning, before its block ends."""

    signature: str


class InputPiece(Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


BlockPiece: TypeAlias = TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """What is added to the block that is open."""

    index: int
    delta: BlockPiece


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """The block is complete."""

    index: int


class MessageStopReason(Struct):
    """Why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The end of the message; `usage` counts all of it."""

    delta: MessageStopReason
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


MESSAGE_EVENTS = (
    MessageStart,
    PingEvent,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
)


class TokensCount(Struct):
    """The tokens of a prompt."""

    input_tokens: int


class ModelInfo(Struct, tag_field="type", tag="model"):
    """A model or adapter. `max_input_tokens` and `max_tokens` are the context, which prompt and output share;
    `created_at` is in RFC 3339."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelInfos(Struct):
    """All models on one page."""

    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


def event_frame(event: Struct) -> bytes:
    """Return an event as server-sent."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _encode(event))


def message_usage(usage: Usage, thinking_tokens: int | None = None) -> MessageUsage:
    """Return the usage object. `thinking_tokens` None: unknown."""
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=usage.output_tokens,
        output_tokens_details=None if thinking_tokens is None else ThinkingTokens(thinking_tokens),
    )


def message_stop(
    head: AnswerHead, finish: FinishReason | None, stopped_by: str | None, *, called: bool
) -> MessageStopReason:
    """Return why a message ended, given what the engine says and whether the model `called` a tool. A stop
    sequence counts before calls: it may have cut one short."""
    if finish is FinishReason.LENGTH:
        return MessageStopReason(
            "model_context_window_exceeded" if head.context_bound else "max_tokens", None
        )
    if finish is FinishReason.CONTENT_FILTER:
        return MessageStopReason("refusal", None)
    if stopped_by in head.stops:
        return MessageStopReason("stop_sequence", stopped_by)
    return MessageStopReason("tool_use" if called else "end_turn", None)
