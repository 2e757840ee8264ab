"""The response bodies: the single definition for the OpenAPI document and for encoding.

Generation responses are the exception: they are written as bytes, for speed, and tests check each of them
against these types.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from kvasir.ports.router import CellView
from kvasir_platform.gateway.openai.schema.operation import (
    PoolSize,
    RecentRequests,
    RequestTimeline,
    RouteStatus,
    StatusVerdict,
)


class PromptTokensDetails(Struct):
    """Cached tokens of the prompt."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Reasoning tokens of the output."""

    reasoning_tokens: int


class UsageInfo(Struct, omit_defaults=True):
    """Token usage of a call over all of its choices. `completion_tokens_details` is present if the output is
    parsed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class LogprobEntry(Struct):
    """One candidate at a position. -9999 stands for minus infinity."""

    token: str
    logprob: float
    bytes: list[int]


class PositionLogprob(LogprobEntry):
    """A position of the output: the sampled token and the most likely candidates."""

    top_logprobs: list[LogprobEntry]


class ChatLogprobs(Struct):
    """Logprobs of a chat's choice."""

    content: list[PositionLogprob]
    refusal: None


class CompletionLogprobs(Struct):
    """Logprobs of a completion's choice by position. The first prompt token has none."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class PromptCandidate(Struct):
    """One candidate at a position of the prompt. `rank` is null for one that is not among the most likely."""

    logprob: float
    rank: int | None
    decoded_token: str


#: Candidates by token id; null for the first token.
PromptLogprobs = list[dict[str, PromptCandidate] | None]


class CalledFunction(Struct):
    """A function call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class AnsweredCall(Struct):
    """A call that the client executes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct, omit_defaults=True):
    """The message of the model. Reasoning is present under both names that clients use."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None
    function_call: CalledFunction | None = None


FinishReason = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]


class ChatChoice(Struct, omit_defaults=True):
    """One choice of a chat. `stop_reason`: the stop string or id of the stop token, or `max_tokens`."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct, omit_defaults=True):
    """The response to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionPiece(Struct, omit_defaults=True):
    """A fragment of a function call; the first one has the name."""

    name: str | None = None
    arguments: str | None = None


class CallPiece(Struct, omit_defaults=True):
    """A fragment of call number `index`; the first one has id and type."""

    index: int
    function: FunctionPiece
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(Struct, omit_defaults=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None
    function_call: FunctionPiece | None = None


class ChunkChoice(Struct, omit_defaults=True):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Struct, omit_defaults=True):
    """One event of a streamed chat. The last event has `usage` and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(Struct, omit_defaults=True):
    """One completion, or what a chunk adds to it; only the last chunk has a `finish_reason`."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(Struct, omit_defaults=True):
    """Completions of one or several prompts in their order, or one event of their stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class Embedding(Struct):
    """The embedding of one input; as text it is little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    """Token usage of an embeddings call."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """The embeddings in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Tokens(Struct, omit_defaults=True):
    """The token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Struct):
    """The text of token ids."""

    prompt: str


class Model(Struct, omit_defaults=True):
    """A model, or a LoRA adapter of the model `parent`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    task: Literal["generate", "embed"]
    root: str | None = None
    parent: str | None = None


class Models(Struct):
    """All models and adapters."""

    object: Literal["list"]
    data: list[Model]


class HealthResponse(Struct):
    """The process is alive."""

    status: Literal["live", "ready"]


class VersionResponse(Struct):
    """The version of Kvasir."""

    version: str


class Readiness(Struct):
    """Whether any model can serve requests, and if not, why."""

    ready: bool
    reason: str | None


class StatusResponse(Struct):
    """Status of the deployment, as `kvasir status` shows it. `reason` says why it is not ready; `readiness`
    has the same for each model, and `queues` what waits for it (kvasir.ports.router.AdmissionView). `policy`
    is the routing policy, one of `policies`. `cells` are this one and those of other regions, if there
    are any (docs/REGIONS.md). `recent` is null if no ended requests are kept."""

    deployment: str
    ready: bool
    reason: str | None
    disaggregation: str
    models: list[str]
    readiness: dict[str, Readiness]
    in_flight: int
    workers: list[dict[str, Any]]
    pools: list[PoolSize]
    queues: dict[str, dict[str, Any]]
    verdict: StatusVerdict
    routes: list[RouteStatus] = []
    policy: str = ""
    policies: tuple[str, ...] = ()
    cells: list[CellView] = []
    recent: RecentRequests | None = None


class Decisions(Struct):
    """Routing decisions of a call, and where its time went: one of each per prompt. A prompt that still waits
    has no decision."""

    request_id: str
    decisions: list[dict[str, Any]]
    timelines: list[RequestTimeline]


class ModelRegret(Struct):
    """The regret of a router's decisions for one model since its start: how many were judged, how many had
    any, and the sum in seconds, in total and by cause."""

    judged: int
    regretted: int
    seconds: float
    causes: dict[str, float]


class RegretPage(Struct):
    """The regret by model."""

    models: dict[str, ModelRegret]


class RecordingRead(Struct, forbid_unknown_fields=True):
    """What a reader of a recording asks for: see kvasir.ports.recordings. `salt` is in hexadecimal digits."""

    salt: str
    after: int = 0
    block_tokens: int = 64
    names: bool = False
    decisions: bool = True
    ids: bool = False
    prefixes: bool = True
    closing: bool = False
    done: bool = False


class RecordingPage(Struct):
    """Records of requests that have ended: see kvasir.ports.recordings, and docs/RECORDING.md for their
    fields."""

    opened: str
    elapsed_s: float
    records: list[dict[str, Any]]
    last: int
    dropped: int
    running: int
    more: bool
    block_tokens: int


class AdapterResult(Struct):
    """The adapter was loaded on these workers, or unloaded from them."""

    message: str
    lora_name: str
    workers: list[str]


class DrainRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Why a worker is drained."""

    reason: str = ""


class Drained(Struct):
    """The request sent to a worker."""

    worker_id: str
    draining: bool
