"""The body of a chat."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.limits import (
    MAX_CALLS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE,
    MAX_TOOLS,
    Alternatives,
    Count,
    FunctionName,
    Hint,
    JsonObject,
    NotServed,
    Variables,
)
from kvasir_platform.gateway.openai.schema.sampling import SamplingFields


class ImageUrl(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """An image as a data URL. `detail` has no effect: each model has one way to take an image."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class MediaUrl(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A video or audio as a data URL."""

    url: str


class InputAudio(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Audio in base64. The header of the file says what it is, whatever `format` says."""

    data: str
    format: Literal["wav", "mp3", "flac"]


class ContentPart(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One part of a message's content: `text` (also as `input_text` and `output_text`), `refusal`, or in
    messages of the user `image_url`, `video_url`, `audio_url` or `input_audio`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    video_url: MediaUrl | None = None
    audio_url: MediaUrl | None = None
    input_audio: InputAudio | None = None
    #: Accepted and ignored: prefixes are cached without it.
    cache_control: JsonObject | None = None

    file: NotServed = None


class FunctionCalled(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A function call; `arguments` is JSON text, or the object itself."""

    name: FunctionName
    arguments: str | JsonObject | None = None


class ToolCall(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """An earlier call of the model. `index` is its number in a stream."""

    id: Hint
    function: FunctionCalled
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One message of a chat. A message of the assistant may be sent back as it was returned."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Hint | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Hint | None = None
    function_call: FunctionCalled | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[JsonObject] | None = None
    #: Accepted and ignored, as in a part.
    cache_control: JsonObject | None = None

    audio: NotServed = None


class Function(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One tool. Only functions are supported."""

    function: Function
    type: Literal["function"] = "function"
    #: Accepted and ignored, as in a part.
    cache_control: JsonObject | None = None


class NamedFunction(Struct, forbid_unknown_fields=True, frozen=True):
    """The name of a function."""

    name: FunctionName


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The name of a tool."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatBody(SamplingFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, str]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: Variables | None = None
    #: A predicted output, accepted and ignored: it does not affect the response.
    prediction: JsonObject | None = None

    audio: NotServed = None
    echo: NotServed = None
    media_io_kwargs: NotServed = None
    mm_processor_kwargs: NotServed = None
    modalities: NotServed = None
    return_prompt_text: NotServed = None
    verbosity: NotServed = None
    web_search_options: NotServed = None
