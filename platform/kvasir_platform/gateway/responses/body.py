"""The body of a call to the Responses API.

Items and tools of all types share one struct each: their type may be missing, and one that is not served is
refused by its name rather than by its first unknown field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.chat import InputAudio
from kvasir_platform.gateway.openai.schema.limits import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Alternatives,
    Count,
    FunctionName,
    Hint,
    JsonObject,
    NotServed,
    Variables,
)
from kvasir_platform.gateway.openai.schema.sampling import CommonFields
from kvasir_platform.gateway.openai.schema.structured import (
    JsonObjectFormat,
    TextFormat,
)


class InputPart(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """One part of an item: `input_text`, `output_text`, `refusal`, `summary_text`, `reasoning_text`,
    `input_image` with a data URL, whose `detail` has no effect, `input_audio`, or `input_video` with a
    data URL, which OpenAI's API has not. What an answer adds to a part is accepted, so
    that output can be sent back as it is."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[JsonObject] | None = None
    logprobs: list[JsonObject] | None = None
    #: What OpenAI's client adds to output that it has parsed: ignored.
    parsed: Any = None
    image_url: str | None = None
    input_audio: InputAudio | None = None
    video_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    file_data: NotServed = None
    file_id: NotServed = None
    file_url: NotServed = None
    filename: NotServed = None


Parts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """One item of the input: `message` (also without a type), `function_call`, `function_call_output`,
    `reasoning`, or `item_reference` with the id of an item of a stored response."""

    type: str | None = None
    id: Hint | None = None
    status: Hint | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    phase: Hint | None = None
    call_id: Hint | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    #: As `parsed` of a part.
    parsed_arguments: Any = None

    namespace: NotServed = None


class ResponseTool(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: str
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    allowed_callers: NotServed = None
    defer_loading: NotServed = None
    output_schema: NotServed = None


class ChosenTool(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`function` with its name, or `allowed_tools` with the functions that may, or must, be called."""

    type: str
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None


class SchemaFormat(
    Struct, kw_only=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True
):
    """JSON output that follows a schema. It is always enforced, regardless of `strict`."""

    name: Hint
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


OutputFormat: TypeAlias = TextFormat | JsonObjectFormat | SchemaFormat


class TextOptions(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`text`."""

    format: OutputFormat | None = None
    verbosity: NotServed = None


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`reasoning`. There are no summaries: the reasoning itself is returned."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Hint | None = None
    generate_summary: Hint | None = None

    context: NotServed = None
    mode: NotServed = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`stream_options`. Events have no obfuscation."""

    include_obfuscation: bool | None = None


class ResponsesBody(CommonFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Alternatives | None = None
    include: Annotated[list[Hint], Meta(max_length=MAX_CALLS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    #: One of vLLM's, with the meaning that it has in chats.
    chat_template_kwargs: Variables | None = None

    #: Accepted and ignored: it does not affect the response.
    max_tool_calls: Count | None = None

    access_programs: NotServed = None
    context_management: NotServed = None
    conversation: NotServed = None
    image: NotServed = None
    moderation: NotServed = None
    prompt: NotServed = None
    prompt_cache_options: NotServed = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether output text has logprobs."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
