"""The bodies of Anthropic's Messages API (https://docs.anthropic.com/en/api/messages).

Fields annotated with `IgnoredObject`, `IgnoredText` or `IgnoredFlag` are accepted without effect, those with
`NotServed` are refused by name; docs/API.md has a table of both, which a test compares with this module.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.limits import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP,
    MAX_TOOLS,
    Count,
    FunctionName,
    Hint,
    JsonObject,
    ModelName,
    NotServed,
    StopString,
)

IgnoredObject = JsonObject
IgnoredText = str
IgnoredFlag = bool
IgnoredList = Annotated[list[JsonObject | str], Meta(max_length=MAX_PARTS)]


class TextBlock(Struct, tag_field="type", tag="text", kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Text."""

    text: str
    cache_control: IgnoredObject | None = None
    citations: IgnoredList | None = None


class Base64Source(
    Struct, tag_field="type", tag="base64", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """An image file in base64."""

    media_type: Annotated[str, Meta(pattern=r"^image/[a-z0-9.+-]{1,64}$")]
    data: str


class UrlSource(Struct, tag_field="type", tag="url", kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Where an image is."""

    url: str


class ImageBlock(
    Struct, tag_field="type", tag="image", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """An image, in messages of the user."""

    source: Base64Source | UrlSource
    cache_control: IgnoredObject | None = None


class DocumentBlock(Struct, tag_field="type", tag="document", kw_only=True, frozen=True):
    """A document, declared only to be refused."""

    source: NotServed = None


class ThinkingBlock(
    Struct, tag_field="type", tag="thinking", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """Earlier reasoning of the model. The `signature` is not verified: reasoning has no more weight here than
    other text of the conversation."""

    thinking: str
    signature: IgnoredText | None = None
    cache_control: IgnoredObject | None = None


class RedactedThinkingBlock(
    Struct, tag_field="type", tag="redacted_thinking", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """Encrypted reasoning of another server, which is dropped."""

    data: str


class ToolUseBlock(
    Struct, tag_field="type", tag="tool_use", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """An earlier call of the model."""

    id: Hint
    name: FunctionName
    input: JsonObject
    cache_control: IgnoredObject | None = None
    caller: IgnoredObject | None = None
    toolset_name: IgnoredText | None = None


class ToolReferenceBlock(
    Struct, tag_field="type", tag="tool_reference", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """A tool that a search for tools has found. Every tool is in the prompt, so that its name is enough."""

    tool_name: FunctionName
    cache_control: IgnoredObject | None = None


class ToolResultBlock(
    Struct, tag_field="type", tag="tool_result", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """The result of a call. With `is_error`, the model reads `Error: ` before it."""

    tool_use_id: Hint
    content: (
        str
        | Annotated[
            list[TextBlock | ToolReferenceBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_PARTS)
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: IgnoredObject | None = None
    toolset_name: IgnoredText | None = None


InputBlock: TypeAlias = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One message of the conversation. Consecutive messages of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], Meta(max_length=MAX_PARTS)]


class ClientTool(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A tool that the client executes; `input_schema` is a JSON schema."""

    name: FunctionName
    input_schema: JsonObject
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: IgnoredList | None = None
    cache_control: IgnoredObject | None = None
    defer_loading: IgnoredFlag | None = None
    eager_input_streaming: IgnoredFlag | None = None
    input_examples: IgnoredList | None = None


class AutoToolChoice(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True, frozen=True):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyToolChoice(Struct, tag_field="type", tag="any", forbid_unknown_fields=True, frozen=True):
    """The model calls a tool of its choice."""

    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(
    Struct, tag_field="type", tag="tool", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """The model calls this tool."""

    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(Struct, tag_field="type", tag="none", forbid_unknown_fields=True, frozen=True):
    """The model calls no tool."""


class ThinkingEnabled(
    Struct, tag_field="type", tag="enabled", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """Reasoning of at most `budget_tokens`. With `display` `omitted` the answer does not show it."""

    budget_tokens: Count
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingAdaptive(
    Struct, tag_field="type", tag="adaptive", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """The model decides how much it reasons."""

    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingDisabled(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True, frozen=True):
    """No reasoning, as far as the chat template can turn it off; none is shown."""


class MessageOutputSchema(
    Struct, tag_field="type", tag="json_schema", kw_only=True, forbid_unknown_fields=True, frozen=True
):
    """JSON output that follows a schema."""

    schema: JsonObject


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`effort` is passed to the chat template as `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageOutputSchema | None = None


class MessagesMetadata(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`user_id` is the session of a request whose header names none, so that requests of one user run near
    their cache."""

    user_id: Hint | None = None


class PromptFields(Struct, kw_only=True, frozen=True):
    """What determines the prompt, in both endpoints."""

    model: ModelName
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoToolChoice | AnyToolChoice | NamedToolChoice | NoToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    #: The older place of `output_config.format`.
    output_format: MessageOutputSchema | None = None

    cache_control: IgnoredObject | None = None
    context_management: IgnoredObject | None = None
    user_profile_id: IgnoredText | None = None
    workspace_id: IgnoredText | None = None

    mcp_servers: NotServed = None
    speed: NotServed = None


class MessagesBody(PromptFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/messages."""

    max_tokens: Count
    metadata: MessagesMetadata | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None

    billing_policy: IgnoredObject | None = None
    diagnostics: IgnoredObject | None = None
    inference_geo: IgnoredText | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    compaction: NotServed = None
    container: NotServed = None
    fallback_credit_token: NotServed = None
    fallbacks: NotServed = None
    thread: NotServed = None


class CountTokensBody(PromptFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/messages/count_tokens."""
