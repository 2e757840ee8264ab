from kvasir.wire.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_FULL: _ClassVar[Leg]
    LEG_PREFILL: _ClassVar[Leg]
    LEG_DECODE: _ClassVar[Leg]
    LEG_EMBED: _ClassVar[Leg]

class Constraint(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSTRAINT_UNSPECIFIED: _ClassVar[Constraint]
    CONSTRAINT_JSON_OBJECT: _ClassVar[Constraint]
    CONSTRAINT_JSON_SCHEMA: _ClassVar[Constraint]
    CONSTRAINT_REGEX: _ClassVar[Constraint]
    CONSTRAINT_CHOICE: _ClassVar[Constraint]
    CONSTRAINT_GRAMMAR: _ClassVar[Constraint]
    CONSTRAINT_STRUCTURAL_TAG: _ClassVar[Constraint]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_UNSPECIFIED: _ClassVar[MediaKind]
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]
    MEDIA_KIND_VIDEO: _ClassVar[MediaKind]
    MEDIA_KIND_AUDIO: _ClassVar[MediaKind]
LEG_UNSPECIFIED: Leg
LEG_FULL: Leg
LEG_PREFILL: Leg
LEG_DECODE: Leg
LEG_EMBED: Leg
CONSTRAINT_UNSPECIFIED: Constraint
CONSTRAINT_JSON_OBJECT: Constraint
CONSTRAINT_JSON_SCHEMA: Constraint
CONSTRAINT_REGEX: Constraint
CONSTRAINT_CHOICE: Constraint
CONSTRAINT_GRAMMAR: Constraint
CONSTRAINT_STRUCTURAL_TAG: Constraint
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
MEDIA_KIND_UNSPECIFIED: MediaKind
MEDIA_KIND_IMAGE: MediaKind
MEDIA_KIND_VIDEO: MediaKind
MEDIA_KIND_AUDIO: MediaKind

class Structured(_message.Message):
    __slots__ = ("constraint", "spec")
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    constraint: Constraint
    spec: str
    def __init__(self, constraint: _Optional[_Union[Constraint, str]] = ..., spec: _Optional[str] = ...) -> None: ...

class Parsing(_message.Message):
    __slots__ = ("tools", "tool_choice", "function", "parallel_tool_calls", "reasoning", "template_kwargs")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    tools: str
    tool_choice: str
    function: str
    parallel_tool_calls: bool
    reasoning: bool
    template_kwargs: str
    def __init__(self, tools: _Optional[str] = ..., tool_choice: _Optional[str] = ..., function: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., reasoning: _Optional[bool] = ..., template_kwargs: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs", "thinking_tokens", "structured")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    n: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: int
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    prompt_logprobs: int
    thinking_tokens: int
    structured: Structured
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., n: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., spaces_between_special_tokens: _Optional[bool] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., prompt_logprobs: _Optional[int] = ..., thinking_tokens: _Optional[int] = ..., structured: _Optional[_Union[Structured, _Mapping]] = ...) -> None: ...

class KvHandoff(_message.Message):
    __slots__ = ("lease_id", "fence", "ttl_s", "blocks", "ticket")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fence: int
    ttl_s: float
    blocks: int
    ticket: bytes
    def __init__(self, lease_id: _Optional[str] = ..., fence: _Optional[int] = ..., ttl_s: _Optional[float] = ..., blocks: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("output_tokens", "text_length")
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    output_tokens: int
    text_length: int
    def __init__(self, output_tokens: _Optional[int] = ..., text_length: _Optional[int] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("offset", "length", "digest", "data", "kind", "extent")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    digest: bytes
    data: bytes
    kind: MediaKind
    extent: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ..., data: _Optional[bytes] = ..., kind: _Optional[_Union[MediaKind, str]] = ..., extent: _Optional[int] = ...) -> None: ...

class SloClass(_message.Message):
    __slots__ = ("name", "ttft_s", "itl_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttft_s: float
    itl_s: float
    def __init__(self, name: _Optional[str] = ..., ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ...) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("request_id", "tokens", "sampling", "leg", "handoff", "adapter", "salt", "priority", "data_parallel_rank", "trace_context", "continuation", "tier_tokens", "parsing", "second_text_at", "media", "slo")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARSING_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_AT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: bytes
    sampling: Sampling
    leg: Leg
    handoff: KvHandoff
    adapter: str
    salt: str
    priority: int
    data_parallel_rank: int
    trace_context: str
    continuation: Continuation
    tier_tokens: int
    parsing: Parsing
    second_text_at: int
    media: _containers.RepeatedCompositeFieldContainer[Media]
    slo: SloClass
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., leg: _Optional[_Union[Leg, str]] = ..., handoff: _Optional[_Union[KvHandoff, _Mapping]] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., priority: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., trace_context: _Optional[str] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., tier_tokens: _Optional[int] = ..., parsing: _Optional[_Union[Parsing, _Mapping]] = ..., second_text_at: _Optional[int] = ..., media: _Optional[_Iterable[_Union[Media, _Mapping]]] = ..., slo: _Optional[_Union[SloClass, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "token", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    token: str
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., token: _Optional[str] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("sampled", "top")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    sampled: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, sampled: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "transfer_s", "decode_s", "tier_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TIER_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    tier_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., tier_s: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "transferred_tokens", "transferred_bytes", "output_tokens", "tier_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    transferred_tokens: int
    transferred_bytes: int
    output_tokens: int
    tier_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., transferred_tokens: _Optional[int] = ..., transferred_bytes: _Optional[int] = ..., output_tokens: _Optional[int] = ..., tier_tokens: _Optional[int] = ...) -> None: ...

class DeltaEnd(_message.Message):
    __slots__ = ("finish", "stop_reason", "last", "usage", "timings", "handoff", "error", "error_message", "reasoning_tokens")
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    finish: FinishReason
    stop_reason: str
    last: bool
    usage: Usage
    timings: Timings
    handoff: KvHandoff
    error: str
    error_message: str
    reasoning_tokens: int
    def __init__(self, finish: _Optional[_Union[FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., last: _Optional[bool] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., handoff: _Optional[_Union[KvHandoff, _Mapping]] = ..., error: _Optional[str] = ..., error_message: _Optional[str] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "call_id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    call_id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class DeltaParts(_message.Message):
    __slots__ = ("reasoning", "tool_calls", "raw_length", "prompt_logprobs", "embedding")
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    RAW_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    raw_length: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    embedding: bytes
    def __init__(self, reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., raw_length: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "index", "offset", "token_ids", "text", "logprobs", "end", "parts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    end: DeltaEnd
    parts: DeltaParts
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., end: _Optional[_Union[DeltaEnd, _Mapping]] = ..., parts: _Optional[_Union[DeltaParts, _Mapping]] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("medium", "blocks", "bytes_used", "bytes_capacity", "loads", "loaded_blocks", "loaded_bytes", "load_s", "stored_blocks", "stored_bytes", "evicted_blocks", "corrupt_blocks", "dropped_blocks", "failures", "trouble", "readable")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    BYTES_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    medium: int
    blocks: int
    bytes_used: int
    bytes_capacity: int
    loads: int
    loaded_blocks: int
    loaded_bytes: int
    load_s: float
    stored_blocks: int
    stored_bytes: int
    evicted_blocks: int
    corrupt_blocks: int
    dropped_blocks: int
    failures: int
    trouble: str
    readable: bool
    def __init__(self, medium: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes_used: _Optional[int] = ..., bytes_capacity: _Optional[int] = ..., loads: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., stored_blocks: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., failures: _Optional[int] = ..., trouble: _Optional[str] = ..., readable: _Optional[bool] = ...) -> None: ...

class GpuLoad(_message.Message):
    __slots__ = ("index", "busy", "memory_used", "memory_total", "power_w", "sm_active", "dram_active")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    SM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    DRAM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    index: int
    busy: float
    memory_used: int
    memory_total: int
    power_w: float
    sm_active: float
    dram_active: float
    def __init__(self, index: _Optional[int] = ..., busy: _Optional[float] = ..., memory_used: _Optional[int] = ..., memory_total: _Optional[int] = ..., power_w: _Optional[float] = ..., sm_active: _Optional[float] = ..., dram_active: _Optional[float] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "kv_blocks_total", "kv_blocks_leased", "prefix_queries_tokens", "prefix_hits_tokens", "transfer_bytes_received", "transfers_received", "transfers_failed", "preemptions", "speculated_tokens", "accepted_tokens", "swapped_in", "recomputed", "tiers", "transfer_peers_refused", "gpus")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_LEASED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SPECULATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PEERS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    kv_blocks_total: int
    kv_blocks_leased: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    transfer_bytes_received: int
    transfers_received: int
    transfers_failed: int
    preemptions: int
    speculated_tokens: int
    accepted_tokens: int
    swapped_in: int
    recomputed: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierLoad]
    transfer_peers_refused: int
    gpus: _containers.RepeatedCompositeFieldContainer[GpuLoad]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_leased: _Optional[int] = ..., prefix_queries_tokens: _Optional[int] = ..., prefix_hits_tokens: _Optional[int] = ..., transfer_bytes_received: _Optional[int] = ..., transfers_received: _Optional[int] = ..., transfers_failed: _Optional[int] = ..., preemptions: _Optional[int] = ..., speculated_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., swapped_in: _Optional[int] = ..., recomputed: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierLoad, _Mapping]]] = ..., transfer_peers_refused: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[GpuLoad, _Mapping]]] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("deltas", "load", "kv")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    load: EngineLoad
    kv: _kv_pb2.KvBatch
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., kv: _Optional[_Union[_kv_pb2.KvBatch, _Mapping]] = ...) -> None: ...
