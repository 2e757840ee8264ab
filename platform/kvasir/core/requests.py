"""What a request is, once the edge has parsed, rendered and tokenized it.

The same frozen values travel from the gateway through the request machine to an engine, so that a
request means one thing everywhere; the wire codec is the only other spelling of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir.core.kv import KvBatch, TierLoad
from kvasir.core.values import value


def token_ids(ids: Iterable[int]) -> array[int]:
    """Prompt tokens as one contiguous uint32 buffer: hashing and the wire take it without a copy per
    token. Never changed after it is made. Raises OverflowError for an id outside uint32."""
    return array("I", ids)


class Role(StrEnum):
    """What a pool of workers does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    EMBED = "embed"


class FinishReason(StrEnum):
    """Why a stream ended, in OpenAI's words where it has one. CONTENT_FILTER is the gateway's own: no engine
    says it."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    ABORT = "abort"
    ERROR = "error"


class Leg(StrEnum):
    """Which part of a request a worker is asked to run.

    FULL is aggregated serving: a hand-off of length zero. EMBED computes one vector and generates nothing.
    """

    FULL = "full"
    PREFILL = "prefill"
    DECODE = "decode"
    EMBED = "embed"


class Task(StrEnum):
    """What a request asks of its model."""

    GENERATE = "generate"
    EMBED = "embed"


class Constraint(StrEnum):
    """What kind of rule the output must follow."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A rule that the output follows token by token. `spec` is the schema or tag as JSON text, the pattern,
    the grammar (EBNF or Lark), a JSON array of choices, or "" for any JSON object."""

    constraint: Constraint
    spec: str = ""


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How the model's text is to be taken apart into content, reasoning and tool calls, in the words of
    OpenAI's API, for the engine's own parsers.

    `tools` is the request's array as JSON text, "" for none; `tool_choice` is none, auto, required, or
    the name of a function in `function`. `reasoning`: whether reasoning is told to the client.
    `template_kwargs` are the client's template variables as JSON text, by which parsers know whether the
    prompt lets the model reason.
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
    is the number of alternatives per position of the output, `prompt_logprobs` of the prompt. `max_tokens`
    None means: up to the model's context. `allowed_token_ids` empty allows all. `thinking_tokens` bounds the
    reasoning.
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


@dataclass(frozen=True, slots=True)
class KvHandoff:
    """Everything a decode worker needs to pull a prompt's KV from the worker that prefilled it.

    `ticket` is opaque to the router: the transfer adapter wrote it and the same adapter reads it.
    `lease_id` and `fence` name the lease on the prefill worker's blocks; the lease ends at the first
    of pulled, released, or `ttl_s` seconds after it was granted.
    """

    lease_id: str
    fence: int
    ttl_s: float
    blocks: int
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Continuation:
    """A leg that goes on where a lost worker stopped: the last `output_tokens` of its tokens are output that
    the client has, of whose text `text_length` characters were taken in (with parsing: before it)."""

    output_tokens: int
    text_length: int


@value
class EngineRequest:
    """One leg of one request, as an engine runs it.

    `request_id` is unique on its worker for the life of the session. `tokens` are the prompt's ids.
    A DECODE leg carries `handoff`; a PREFILL leg generates one token, which is discarded, and its
    last delta carries a handoff. `data_parallel_rank` None lets the engine choose.

    With a `continuation`, limits, penalties and stop strings of `sampling` (which is the request's own) count
    the output among `tokens` as output, the first delta's offset is its length, and text begins where the
    client's ends. Usage counts what this leg computes: all of `tokens` as prompt, and its own output.

    `tier_tokens` is how much of the prompt the router believes to be in tiers below the device and not on it,
    so that the worker can begin to fetch it before the engine gets to the request; a belief, and no promise.
    With `parsing`, deltas carry the text taken apart.
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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position."""

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
    """Durations in seconds that only the worker can know. Zero where a leg has no such part."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    tier_s: float = 0.0


@value
class Usage:
    """Token counts of one leg. `cached_tokens` is the engine's own prefix hit, `tier_tokens` of which came
    from a tier below the device; `transferred_tokens` came from another worker; all count within
    `prompt_tokens`. `transferred_bytes` is what was really moved."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    output_tokens: int = 0
    tier_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the tool call number `index` of a choice. The first one of a call has `call_id` and `name`;
    `arguments` of all put together are its JSON text."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@value
class Delta:
    """What one engine step added to one choice of one request.

    `offset` is the index of `token_ids[0]` in that choice's output: a receiver that expects another
    offset has lost or repeated a token. `finish` ends the choice. `usage`, `timings` and `handoff`
    come with the last delta of the request; where a FULL leg found some of its prompt in a cache, its first
    delta brings `usage` as well, as it is by then: whoever ends a request early never sees the last one.
    `error` (a stable code) comes with finish=ERROR, `error_message` with it. A PREFILL leg may carry its
    handoff before that too, as soon as a part of its KV can be pulled; the last delta then carries the same
    lease again.

    Where the request wants parsing, `text` is content alone, `reasoning` and `tool_calls` are the rest, and
    `raw_length` is how many characters of the engine's text this step has taken in; None elsewhere.
    `reasoning_tokens`, with the last delta, counts the choice's output that was reasoning. The first delta of
    a request with `prompt_logprobs` has one entry for each prompt token, None for the first. The only delta
    of an EMBED leg carries the `embedding`, float32.
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
    """A worker's own view of its load at one step. Rates and the cost model build on it.

    `kv_usage` is the fraction of KV blocks in use by running requests. Counters only grow within
    one worker epoch. Of the requests that were preempted, `swapped_in` went on from KV that a tier had kept,
    `recomputed` without. A load that comes with tokens has no `tiers`: what was said of them last stands.
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
    tiers: tuple[TierLoad, ...] = ()


@value
class StepBatch:
    """All that one engine step produced, for every running request: one message on the wire. `kv` is
    what has changed in the worker's prefix cache since its last batch of changes."""

    deltas: tuple[Delta, ...] = ()
    load: EngineLoad | None = None
    kv: KvBatch | None = None


EMPTY_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class SloClass:
    """What a request's client was promised: seconds to the first token, and between two tokens."""

    name: str
    ttft_s: float
    itl_s: float


DEFAULT_SLO = SloClass("default", ttft_s=2.0, itl_s=0.1)


def _no_blocks() -> array[int]:
    return array("Q")


@value
class Request:
    """A client's request inside the router: tokens in, no text of the prompt kept.

    `arrival_s` is the router clock's reading. `deadline_s` (same clock) ends it wherever it is.
    `block_hashes` are the names of the prompt's whole blocks as array('Q'), empty where they are not
    known yet. `session` is the client's own name for what belongs together, "" for none. `tenant` is who is
    charged for it, "" for nobody in particular. The smaller `priority`, the sooner it runs. `trace_context`
    is a W3C traceparent, and after a space its tracestate, if it has one.
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
    block_hashes: array[int] = field(default_factory=_no_blocks, repr=False)
    slo: SloClass = DEFAULT_SLO
    session: str = ""
    task: Task = Task.GENERATE
    parsing: OutputParsing | None = None
    tenant: str = ""
