"""The state of a request in the simulated scheduler, and the requests that it refuses."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Set
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir.core.errors import ConfigError
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import Delta, EngineRequest, FinishReason, KvHandoff, Leg, Sampling, Timings, Usage
from kvasir.native.salt_places import SaltPlace, salt_place
from kvasir_workers.engines.continued import continuation_fault, continued_tokens, text_fault
from kvasir_workers.engines.sim.blocks import chain_hash, root_hash
from kvasir_workers.engines.sim.model import Context, SimModel
from kvasir_workers.engines.sim.output import SimOutput, output_text
from kvasir_workers.engines.sim.speech import Speech, SpeechParser


@dataclass(frozen=True, slots=True)
class SimLimits:
    """The scheduler's limits. Lengths and `step_tokens` in tokens, `blocks` of `block_size` tokens, `lease_s`
    in seconds; `max_live` is the number of requests held at once, including waiting ones. `ranks` is the
    number of such schedulers in the engine. With `overlap`, a prompt of several chunks is offered after its
    first one."""

    block_size: int
    blocks: int
    bytes_per_block: int
    max_model_len: int
    max_seqs: int
    step_tokens: int
    chunked_prefill: bool
    prefix_caching: bool
    lease_s: float
    recompute_on_failure: bool
    max_live: int
    seed: int = 0
    adapters: Set[str] = frozenset()
    """May change while the engine runs."""
    ranks: int = 1
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"{self.blocks} KV blocks of {self.block_size} tokens hold less than one request of "
                f"max_model_len {self.max_model_len}: raise engine.kv_cache_bytes or lower "
                "model.max_model_len"
            )

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)


class SequenceState(StrEnum):
    """State of a sequence. PULLING waits for KV from another worker, HELD for the choice that pulls; READY
    has its prompt's KV and waits for a place in the batch."""

    WAITING = "waiting"
    PULLING = "pulling"
    HELD = "held"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Live:
    """One leg that has not ended. `offered`: its KV may be pulled already."""

    request: EngineRequest
    arrived_s: float
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 0
    admitted_s: float | None = None
    transferred_s: float = 0.0
    first_token_s: float | None = None
    cached_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    offered: KvHandoff | None = None

    def usage(self) -> Usage:
        """Return the current token counts."""
        prefill = self.request.leg is Leg.PREFILL
        return Usage(
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
            transferred_bytes=self.transferred_bytes,
            output_tokens=0 if prefill else sum(s.output.generated for s in self.sequences),
        )

    def timings(self, now: float) -> Timings:
        """Return the durations of the last delta; a request that ends early has no later stages."""
        admitted = now if self.admitted_s is None else self.admitted_s
        first = now if self.first_token_s is None else self.first_token_s
        return Timings(
            queue_s=admitted - self.arrived_s,
            prefill_s=max(0.0, first - admitted - self.transferred_s),
            transfer_s=self.transferred_s,
            decode_s=now - first,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens, its blocks, and how much KV is computed.

    `hashes` are the chained hashes of its full blocks, computed as needed. `media` have their keys.
    """

    live: Live
    index: int
    key: tuple[int, int, int]
    tokens: array[int]
    context: Context
    output: SimOutput
    root: bytes
    place: SaltPlace | None = None
    media: tuple[tuple[PromptMedia, str], ...] = ()
    parser: SpeechParser | None = None
    state: SequenceState = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    stored: int = 0
    computed: int = 0

    @property
    def pending(self) -> int:
        """Tokens without KV; a decoding sequence has one."""
        return len(self.tokens) - self.computed

    def hash_up_to(self, blocks: int, block_size: int) -> None:
        """Extend `hashes` to the first `blocks` full blocks."""
        while len(self.hashes) < blocks:
            begin = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self.root
            if self.place is not None and len(self.hashes) == self.place.tokens // block_size:
                parent += self.place.key.encode()
            for item, key in self.media:
                if item.offset < begin + block_size and begin < item.offset + item.length:
                    parent += key.encode()
            self.hashes.append(chain_hash(parent, self.tokens[begin : begin + block_size]))


class SequenceQueue:
    """Sequences in the order of priority (lower first), then arrival."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: int) -> Sequence:
        return self._items[at][1]

    def add(self, sequence: Sequence, state: SequenceState) -> None:
        """Insert a sequence and set its state."""
        sequence.state = state
        insort(self._items, (sequence.key, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the queue."""
        at = bisect_left(self._items, sequence.key, key=lambda item: item[0])
        del self._items[at]


def make_sequences(live: Live, model: SimModel, limits: SimLimits, arrival: int) -> list[Sequence]:
    """Return the choices of a request; a prefill leg has one, whatever `n` is."""
    request = live.request
    sampling = request.sampling
    resumed = continued_tokens(request)
    room = limits.max_model_len - len(request.tokens) + resumed
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    choices = 1 if request.leg is Leg.PREFILL else sampling.n
    speech = _speech(request, model)
    sequences: list[Sequence] = []
    place = salt_place(request.salt)
    media = tuple((item, item.key(request.salt)) for item in request.media)
    for index in range(choices):
        context = Context(limits.seed, request.adapter, sampling, index)
        for item in request.media:
            context.see(item.digest)
        context.extend(request.tokens)
        output = SimOutput(model, sampling, limit, speech)
        parser = None
        if request.parsing is not None and speech is not None:
            parser = SpeechParser(speech, request.parsing)
        if request.continuation is not None:
            there, length = request.tokens[-resumed:], request.continuation.text_length
            output.resume(there, length)
            if parser is not None:
                parser.take(output_text(model, sampling, there, speech)[:length], there, finished=False)
        sequences.append(
            Sequence(
                live=live,
                index=index,
                key=(request.priority, arrival, index),
                tokens=request.tokens[:],
                context=context,
                output=output,
                root=root_hash("" if place is not None else request.salt, request.adapter),
                place=place,
                media=media,
                parser=parser,
            )
        )
    return sequences


def _speech(request: EngineRequest, model: SimModel) -> Speech | None:
    if request.parsing is None or request.leg is Leg.PREFILL:
        return None
    prompt = request.tokens[: len(request.tokens) - continued_tokens(request)]
    return Speech(model, request.parsing, prompt, ends=not request.sampling.ignore_eos)


def refusal(request: EngineRequest, limits: SimLimits, model: SimModel) -> tuple[str, str] | None:
    """Return the stable code and the message with which a request is refused, or None."""
    prompt = len(request.tokens)
    if prompt == 0:
        return "invalid_request", "the prompt has no tokens"
    if prompt >= limits.max_model_len:
        return (
            "context_length_exceeded",
            f"the prompt has {prompt} tokens; with one token of output the context of "
            f"{limits.max_model_len} is exceeded",
        )
    if request.adapter is not None and request.adapter not in limits.adapters:
        return "invalid_request", f"adapter {request.adapter!r} is not loaded on this worker"
    rank = request.data_parallel_rank
    if rank is not None and not 0 <= rank < limits.ranks:
        return "invalid_request", f"rank {rank} does not exist: there are {limits.ranks}"
    return _bad_leg(request) or _bad_sampling(request.sampling) or _bad_continuation(request, model)


def _bad_leg(request: EngineRequest) -> tuple[str, str] | None:
    if request.leg is Leg.DECODE and request.handoff is None:
        return "invalid_request", "a decode leg needs the hand-off of its prefill leg"
    if request.leg is Leg.EMBED:
        return "invalid_request", "this worker generates: embeddings are made by pools of role embed"
    return None


def _bad_continuation(request: EngineRequest, model: SimModel) -> tuple[str, str] | None:
    fault = continuation_fault(request)
    if fault is None and request.continuation is not None:
        resumed = request.tokens[-request.continuation.output_tokens :]
        known = len(output_text(model, request.sampling, resumed, _speech(request, model)))
        if request.continuation.text_length > known:
            fault = text_fault(request.continuation.text_length, known)
    return None if fault is None else ("invalid_request", fault)


def _bad_sampling(sampling: Sampling) -> tuple[str, str] | None:
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        return "invalid_request", f"max_tokens must be at least 1, not {sampling.max_tokens}"
    if sampling.n < 1:
        return "invalid_request", f"n must be at least 1, not {sampling.n}"
    if sampling.temperature < 0:
        return "invalid_request", f"temperature must not be negative, is {sampling.temperature}"
    if "" in sampling.stop:
        return "invalid_request", "a stop string must not be empty"
    return None


def refused(request: EngineRequest, code: str, message: str) -> Delta:
    """Return the only delta of a refused request."""
    return Delta(
        request_id=request.request_id,
        offset=continued_tokens(request),
        finish=FinishReason.ERROR,
        last=True,
        usage=Usage(prompt_tokens=len(request.tokens)),
        timings=Timings(),
        error=code,
        error_message=message,
    )


@dataclass(frozen=True, slots=True)
class SimPullOrder:
    """Pull `missing` blocks of a prompt from number `first` on, each of `block_bytes`; `hashes` has one entry
    per block of the prompt."""

    request_id: str
    handoff: KvHandoff
    hashes: tuple[bytes, ...]
    first: int
    missing: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        """Total bytes to be moved."""
        return self.missing * self.block_bytes
