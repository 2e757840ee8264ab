"""The bodies that the Responses API returns, for the OpenAPI document: they are written from dictionaries,
and tests check each of them against these types."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from kvasir_platform.gateway.openai.schema.answers import PositionLogprob
from kvasir_platform.gateway.openai.schema.limits import JsonObject

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputPart(Struct, kw_only=True, omit_defaults=True):
    """A part of an item: `output_text` or `reasoning_text`."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[JsonObject] | None = None
    logprobs: list[PositionLogprob] | None = None


class OutputItem(Struct, kw_only=True, omit_defaults=True):
    """An item of the output: `message`, `reasoning` or `function_call`. Summaries are empty."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: ItemStatus
    role: Literal["assistant"] | None = None
    content: list[OutputPart] | None = None
    summary: list[JsonObject] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokensDetails(Struct):
    """Tokens of the input that were cached. Writes to caches are not counted."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct):
    """Reasoning tokens of the output."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Token usage of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseErrorDetail(Struct):
    """Why a response failed; the message has the code of docs/errors.md."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ReasoningEcho(Struct):
    """The effort that was asked for."""

    effort: str | None
    summary: None


class TextEcho(Struct):
    """The format that was asked for."""

    format: JsonObject


class ResponseObject(Struct, kw_only=True):
    """A response. What was asked for is repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseErrorDetail | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class ResponseEvent(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream. Numbers count from 0 without a gap."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[PositionLogprob] | None = None


class InputItemsPage(Struct):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(Struct):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: bool
