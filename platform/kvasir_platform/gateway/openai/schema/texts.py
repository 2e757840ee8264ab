"""The request bodies other than chat: completions, embeddings, tokenization."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.chat import Message, Tool
from kvasir_platform.gateway.openai.schema.limits import (
    MAX_MESSAGES,
    MAX_TEMPLATE,
    MAX_TOOLS,
    Alternatives,
    Hint,
    Long,
    ModelName,
    NotServed,
    TokenId,
    Variables,
)
from kvasir_platform.gateway.openai.schema.sampling import SamplingFields

_Ids = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionBody(SamplingFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | _Ids], Meta(min_length=1)]
    logprobs: Alternatives | None = None
    echo: bool | None = None

    prompt_embeds: NotServed = None
    suffix: NotServed = None


class EmbeddingBody(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/embeddings."""

    model: ModelName
    input: str | Annotated[list[str | TokenId | _Ids], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Long | None = None
    user: Hint | None = None

    embed_dtype: NotServed = None
    endianness: NotServed = None
    messages: NotServed = None
    normalize: NotServed = None
    padding: NotServed = None
    request_id: NotServed = None
    use_activation: NotServed = None


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /tokenize: a text in `prompt`, or a chat in `messages`. `model` defaults to the first model."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: Variables | None = None

    media_io_kwargs: NotServed = None
    mm_processor_kwargs: NotServed = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /detokenize. `model` defaults to the first model."""

    tokens: list[TokenId]
    model: ModelName | None = None
