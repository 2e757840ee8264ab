"""The fields that bodies share: those of chats, completions and responses, and those of the first two."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.limits import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_STOP,
    Alternatives,
    Count,
    Hint,
    JsonObject,
    Long,
    Metadata,
    ModelName,
    NotServed,
    Penalty,
    StopString,
    TokenId,
    TokenIds,
    Unit,
    Whole,
)
from kvasir_platform.gateway.openai.schema.structured import (
    Grammar,
    Options,
    Regex,
    ResponseFormat,
    StructuredOutputs,
)


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: NotServed = None


class CommonFields(Struct, kw_only=True, frozen=True):
    """The fields that chats, completions and responses share, with one meaning."""

    model: ModelName
    min_tokens: Whole | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Unit | None = None
    seed: Long | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    priority: Long | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    user: Hint | None = None
    safety_identifier: Hint | None = None
    session_id: Hint | None = None
    prompt_cache_key: Hint | None = None

    #: Accepted and ignored by the server; responses repeat it.
    metadata: Metadata | None = None
    #: Accepted and ignored.
    prompt_cache_retention: Hint | None = None

    #: Not supported; default values are accepted.
    service_tier: NotServed = None


class SamplingFields(CommonFields, kw_only=True, frozen=True):
    """The fields that chats and completions share."""

    max_tokens: Whole | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] | None
    ) = None
    allowed_token_ids: TokenIds | None = None
    bad_words: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=MAX_BAD_WORDS)]
        | None
    ) = None
    prompt_logprobs: Alternatives | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    response_format: ResponseFormat | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: Regex | None = None
    guided_choice: Options | None = None
    guided_grammar: Grammar | None = None

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Accepted and ignored: they do not affect the response.
    guided_decoding_backend: Hint | None = None
    stream_interval: Count | None = None

    # Not supported by the server or its workers; default values are accepted.
    detokenize: NotServed = None
    ec_transfer_params: NotServed = None
    guided_whitespace_pattern: NotServed = None
    kv_transfer_params: NotServed = None
    length_penalty: NotServed = None
    logprob_token_ids: NotServed = None
    mm_payload: NotServed = None
    repetition_detection: NotServed = None
    request_id: NotServed = None
    return_mm_kwargs: NotServed = None
    return_token_offsets: NotServed = None
    routed_experts_prompt_start: NotServed = None
    store: NotServed = None
    use_beam_search: NotServed = None
    vllm_xargs: NotServed = None
    watermarking: NotServed = None

    @property
    def session(self) -> str | None:
        """Return the session of the body: vLLM's `session_id`, OpenAI's `prompt_cache_key`, which marks
        prompts with a common prefix, or the older `user`."""
        return self.session_id or self.prompt_cache_key or self.user
