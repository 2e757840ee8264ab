"""Requests after the edge has parsed, rendered and tokenized them.

Gateway, request machine and engines use the same frozen values, so a request has one meaning everywhere. The
wire codec is their only other form.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvasir.core.kv import KvBatch, TierLoad
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.values import value


def token_ids(ids: Iterable[int]) -> array[int]:
    """Return prompt tokens as one contiguous uint32 buffer, which hashing and the wire use without copying
    each token. Callers must not change it. Raises OverflowError for an id outside of uint32."""
    return array("I", ids)


class Role(StrEnum):
    """The part of a request that the workers of a pool run."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    EMBED = "embed"


class FinishReason(StrEnum):
    """Why a stream ended, as named by OpenAI if possible. CONTENT_FILTER is set by the gateway only, never by
    an engine."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    ABORT = "abort"
    ERROR = "error"


class Leg(StrEnum):
    """The part of a request that a worker runs.

    FULL is aggregated serving, with a hand-off of length zero. EMBED computes one vector: an embedding, or
    the probabilities of classes.
    """

    FULL = "full"
    PREFILL = "prefill"
    DECODE = "decode"
    EMBED = "embed"


class Task(StrEnum):
    """The task of a request."""

    GENERATE = "generate"
    EMBED = "embed"


class Constraint(StrEnum):
    """The kind of constraint on the output."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint that is enforced for each token. `spec` is the schema or tag as JSON text, the pattern,
    the grammar (EBNF or Lark), a JSON array of choices, or "" for any JSON object."""

    constraint: Constraint
    spec: str = ""


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How the engine's parsers split the model's text into content, reasoning and tool calls, in the terms of
    OpenAI's API.

    `tools` is the request's array as JSON text, "" for none. `tool_choice` is none, auto, required, or
    function with its name in `function`. `reasoning`: whether reasoning is returned to the client.
    `template_kwargs` are the client's template variables as JSON text, from which parsers derive whether the
    prompt enables reasoning.
    """

    tools: str = ""
    tool_choice: str = "none"
    function: str = ""
    parallel_tool_calls: bool = True
    reasoning: bool = True
    template_kwargs: str = ""


@value
class Sampling:
    """Sampling parameters, with vLLM's meaning and defaults (vllm.SamplingParams).

    `seed`, `logprobs`, `prompt_logprobs`, `thinking_tokens` and `max_tokens` are None when unset. `logprobs`
    is the number of alternatives per output position, `prompt_logprobs` per prompt position. `max_tokens`
    None means up to the model's context. An empty `allowed_token_ids` allows all. `thinking_tokens` bounds
    the reasoning.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    thinking_tokens: int | None = None
    structured: StructuredOutput | None = None


@value
class KvHandoff:
    """What a decode worker needs to pull a prompt's KV from the worker that prefilled it.

    `ticket` is opaque to the router; only the transfer adapter reads and writes it. `lease_id` and `fence`
    name the lease on the prefill worker's blocks. The lease ends when the blocks are pulled or released, or
    `ttl_s` seconds after it was granted.
    """

    lease_id: str
    fence: int
    ttl_s: float
    blocks: int
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Continuation:
    """Continuation of a stream whose worker was lost. The last `output_tokens` of the leg's tokens are output
    that the client has received; `text_length` characters of their text were processed (counted before
    parsing)."""

    output_tokens: int
    text_length: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Output that a client has of a request that ran in another cell, and that goes on after it: its tokens,
    and the characters of their text before parsing."""

    tokens: tuple[int, ...]
    characters: int


@value
class EngineRequest:
    """One leg of one request, as an engine runs it.

    `request_id` is unique on its worker for the life of the session. `tokens` are the token ids of the
    prompt. A DECODE leg has a `handoff`. A PREFILL leg generates one token, which is discarded, and its last
    delta has a handoff. With `data_parallel_rank` None, the engine chooses.

    With a `continuation`, the limits, penalties and stop strings of `sampling` treat the output in `tokens`
    as output, the offset of the first delta is its length, and text starts where the client's text ends.
    Usage counts what this leg computes: all of `tokens` as prompt, and its own output.

    `tier_tokens` is the router's estimate of prompt tokens that are in tiers but not on the device, which the
    worker can prefetch. With `parsing`, deltas carry parsed text. An EMBED leg of two texts has in
    `second_text_at` the index of the token at which token types change from the first's to the second's.
    `media` are in the order of their offsets. `slo` is the class of a leg with a trace context.
    """

    request_id: str
    tokens: array[int]
    sampling: Sampling
    leg: Leg = Leg.FULL
    handoff: KvHandoff | None = None
    adapter: str | None = None
    salt: str = ""
    priority: int = 0
    data_parallel_rank: int | None = None
    trace_context: str = ""
    continuation: Continuation | None = None
    tier_tokens: int = 0
    parsing: OutputParsing | None = None
    second_text_at: int | None = None
    media: tuple[PromptMedia, ...] = ()
    slo: SloClass | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate token at one position."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The sampled token at one position and its `top` alternatives, best first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@value
class Timings:
    """Durations in seconds, measured by the worker. Zero for parts that a leg does not have."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    tier_s: float = 0.0


@value
class Usage:
    """Token counts of one leg. `cached_tokens` is the prefix hit of the engine, of which `tier_tokens` came
    from a KV tier; `transferred_tokens` came from another worker. All are part of `prompt_tokens`.
    `transferred_bytes` is the number of bytes that were moved."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    output_tokens: int = 0
    tier_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the tool call with number `index` of a choice. The first piece has `call_id` and `name`; the
    concatenated `arguments` of all pieces are JSON text."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@value
class Delta:
    """What one engine step added to one choice of one request.

    `offset` is the index of `token_ids[0]` in the output of the choice; a receiver that expects another
    offset has lost or repeated a token. `finish` ends the choice. `usage`, `timings` and `handoff` are in the
    last delta of the request. If a FULL leg found part of its prompt in a cache, its first delta also has the
    `usage` so far, because a request that ends early has no last delta. `error` (a stable code) and
    `error_message` come with finish=ERROR. A PREFILL leg can send its handoff earlier, as soon as part of its
    KV can be pulled; the last delta then has the same lease.

    If the request uses parsing, `text` is content only, `reasoning` and `tool_calls` are the rest, and
    `raw_length` is the number of characters of the engine's text in this step; else it is None.
    `reasoning_tokens`, in the last delta, counts the reasoning in the choice's output. With
    `prompt_logprobs`, the first delta has one entry for each prompt token, None for the first. The only delta
    of an EMBED leg has the `embedding`, or the probabilities of classes, as float32.
    """

    request_id: str
    offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    index: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | None = None
    last: bool = False
    usage: Usage | None = None
    timings: Timings | None = None
    handoff: KvHandoff | None = None
    error: str | None = None
    error_message: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    raw_length: int | None = None
    reasoning_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] = ()
    embedding: array[float] | None = None


@value
class EngineLoad:
    """The load that a worker reports with a step. Rates and the cost model are derived from it.

    `kv_usage` is the fraction of KV blocks in use by running requests. Counters only grow within one worker
    epoch. Of preempted requests, `swapped_in` resumed from KV in a tier, and `recomputed` did not.
    `transfer_peers_refused` had no valid ticket for KV. A load that comes with tokens has no `tiers` and no
    `gpus`; the last reported ones remain valid.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_blocks_total: int = 0
    kv_blocks_leased: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    transfer_bytes_received: int = 0
    transfers_received: int = 0
    transfers_failed: int = 0
    preemptions: int = 0
    speculated_tokens: int = 0
    accepted_tokens: int = 0
    swapped_in: int = 0
    recomputed: int = 0
    transfer_peers_refused: int = 0
    tiers: tuple[TierLoad, ...] = ()
    gpus: tuple[GpuLoad, ...] = ()


@value
class StepBatch:
    """The output of one engine step for all running requests: one message on the wire. `kv` has the changes
    of the worker's prefix cache since the last batch of changes."""

    deltas: tuple[Delta, ...] = ()
    load: EngineLoad | None = None
    kv: KvBatch | None = None


EMPTY_SAMPLING = Sampling()


@value
class SloClass:
    """An SLO class: the promised TTFT and ITL in seconds."""

    name: str
    ttft_s: float
    itl_s: float


DEFAULT_SLO = SloClass("default", ttft_s=2.0, itl_s=0.1)


class RouteArm(NamedTuple):
    """The route that a client named, and the arm of it that answers: a model or an adapter, by its served
    name."""

    route: str
    arm: str


def _no_blocks() -> array[int]:
    return array("Q")


@value
class Request:
    """A client's request inside the router, which keeps the tokens but not the text of the prompt.

    `arrival_s` is a reading of the router's clock. `deadline_s` (same clock) ends the request in any state.
    `block_hashes` are the names of the prompt's whole blocks as array('Q'), empty while unknown. `session` is
    the client's name for a group of requests, "" for none. `tenant` is charged for the request, "" for none,
    and `key` identifies the API key that sent it, "" without one. Smaller values of `priority` run sooner.
    `trace_context` is a W3C traceparent, followed by a space and the tracestate if there is one. `route_arm`
    is None if the client named a model. `policy` is the routing policy that places it, "" for that of the
    deployment. `worker` runs the part of it that its role allows, unless it cannot; "" for any.
    `second_text_at` and `media` are EngineRequest's. With `resumed` it begins after output that the client
    has: deltas start there, and usage covers all of it.
    """

    request_id: str
    model: str
    tokens: array[int]
    sampling: Sampling = EMPTY_SAMPLING
    adapter: str | None = None
    salt: str = ""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    priority: int = 0
    trace_context: str = ""
    block_hashes: array[int] = field(default_factory=_no_blocks)
    slo: SloClass = DEFAULT_SLO
    session: str = ""
    task: Task = Task.GENERATE
    parsing: OutputParsing | None = None
    tenant: str = ""
    route_arm: RouteArm | None = None
    policy: str = ""
    key: str = ""
    worker: str = ""
    second_text_at: int | None = None
    media: tuple[PromptMedia, ...] = ()
    resumed: Resumed | None = None
