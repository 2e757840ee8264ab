"""The time of one step of an engine: arithmetic, memory, communication, and what limits it.

The linear layers take the longer of their arithmetic and of reading their weights, the attention of prompts
and of streams likewise for KV (Williams et al., Roofline, 2009). Tensor parallelism adds two all-reduces per
layer, pipeline parallelism a transfer between stages, expert parallelism two all-to-alls per layer with
experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from kvasir.performance.coefficients import DATA_SHEET, NOMINAL, Coefficients
from kvasir.performance.device import Device
from kvasir.performance.work import ModelWork
from kvasir.sizing.shape import EngineShape, kv_element_bytes

_ACTIVATION_BYTES = 2
_REDUCES_PER_LAYER = 2


class Limit(Enum):
    """What a step spends most of its time on."""

    COMPUTE = "compute"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`tokens` of a prompt that a step computes, behind `context` tokens that are computed already. The chunk
    that ends a prompt samples a token: `last`."""

    tokens: int
    context: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes: `prompts`, and one token (with speculation `lookahead` more) for each of
    `streams`, which have `context` tokens each on average."""

    prompts: tuple[PromptChunk, ...] = ()
    streams: int = 0
    context: float = 0.0
    lookahead: int = 0

    @property
    def mixed(self) -> bool:
        """Whether prompts are computed beside streams."""
        return bool(self.prompts) and self.streams > 0

    @property
    def queries(self) -> int:
        """Tokens of streams."""
        return self.streams * (1 + self.lookahead)

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.queries + sum(chunk.tokens for chunk in self.prompts)


@dataclass(frozen=True, slots=True)
class StepWorkTimes:
    """Seconds that parts of a step would take alone: the arithmetic of linear layers and the reading of their
    weights, the arithmetic of attention and the reading of KV and states."""

    linear_s: float
    weights_s: float
    attention_s: float
    kv_s: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step. `compute_s` and `memory_s` are each what the operations and the bytes alone would
    take; `device_s` is what both take together, not less than either."""

    compute_s: float
    memory_s: float
    device_s: float
    communication_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        """The step's time."""
        return self.device_s + self.communication_s + self.overhead_s

    @property
    def limit(self) -> Limit:
        """The largest part of the step's time."""
        device = Limit.COMPUTE if self.compute_s >= self.memory_s else Limit.MEMORY
        parts = {
            device: self.device_s,
            Limit.COMMUNICATION: self.communication_s,
            Limit.OVERHEAD: self.overhead_s,
        }
        return max(parts, key=lambda each: parts[each])


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One engine: a model on `shape.ranks` devices. `weight_bytes` is one parameter as stored, `expert_bytes`
    one of an expert (0: the same), and `compute_dtype` the dtype of the arithmetic, which may be wider (4-bit
    weights are computed in 16 bits on devices without units for them): see kvasir.performance.precision."""

    work: ModelWork
    device: Device
    shape: EngineShape
    weight_bytes: float = 2.0
    compute_dtype: str = "bfloat16"
    coefficients: Coefficients = DATA_SHEET
    expert_bytes: float = 0.0

    def step(self, batch: StepWork) -> StepTime:
        """Return the time of one step."""
        if not batch.prompts and not batch.streams:
            return StepTime(0.0, 0.0, 0.0, 0.0, 0.0)
        reached, parts = self.coefficients, self.parts(batch)
        return StepTime(
            compute_s=parts.linear_s + parts.attention_s,
            memory_s=parts.weights_s + parts.kv_s,
            device_s=max(parts.linear_s, parts.weights_s) + max(parts.attention_s, parts.kv_s),
            communication_s=self._communication_s(batch.tokens),
            overhead_s=reached.step_s
            + (reached.mixed_s if batch.mixed else 0.0)
            + reached.stream_s * batch.streams
            + reached.prompt_s * len(batch.prompts),
        )

    def parts(self, batch: StepWork) -> StepWorkTimes:
        """Return what each kind of work of a step would take alone."""
        work, shape, reached = self.work, self.shape, self.coefficients
        queries, tokens = batch.queries, batch.tokens
        sampled = queries + sum(chunk.last for chunk in batch.prompts)
        ranks, peak = shape.tensor * shape.data, self.device.peak(self.compute_dtype)
        bytes_per_s = ranks * self.device.bytes_per_s * reached.bandwidth
        # Ranks of data parallelism hold the dense weights each.
        copies = shape.data * (work.dense + work.head)
        experts = work.weights_read(tokens) - work.dense - work.head
        expert_bytes = self.expert_bytes or self.weight_bytes
        attention = queries * work.attention_flops(1, batch.context) + sum(
            work.prompt_flops(chunk.tokens, chunk.context) for chunk in batch.prompts
        )
        return StepWorkTimes(
            linear_s=work.linear_flops(tokens, sampled) / (ranks * peak * reached.arithmetic),
            weights_s=(copies * self.weight_bytes + experts * expert_bytes) / bytes_per_s,
            attention_s=attention / (ranks * peak * reached.attention),
            kv_s=self._kv_read(batch) / bytes_per_s,
        )

    def intensity(self, batch: StepWork) -> float:
        """Return the operations of a step for each byte that it reads: above the device's ridge, arithmetic
        limits it at nominal rates, and memory below."""
        parts = replace(self, coefficients=NOMINAL).parts(batch)
        moved_s = parts.weights_s + parts.kv_s
        ridge = self.device.ridge(self.compute_dtype)
        return ridge * (parts.linear_s + parts.attention_s) / moved_s if moved_s else math.inf

    def _kv_read(self, batch: StepWork) -> float:
        """Return the bytes of KV and of states that all ranks read and write."""
        element, tensor = kv_element_bytes(self.shape), self.shape.tensor
        held = 0.0
        for each in self.work.attention:
            # Ranks beyond the number of KV heads read copies.
            copies = max(1.0, tensor / each.kv_heads) if each.kv_heads else 1.0
            tokens = batch.streams * each.attended(batch.context) + sum(
                each.attended(chunk.context + chunk.tokens) for chunk in batch.prompts
            )
            held += copies * each.layers * each.elements * tokens
        states = (batch.streams + len(batch.prompts)) * 2.0 * self.work.state_bytes
        return held * element + states

    def _communication_s(self, tokens: float) -> float:
        """Return the time of all exchanges of a step. A ring all-reduce moves 2 (n-1)/n of the data over each
        link (Patarasuk and Yuan, 2009)."""
        shape, work, reached = self.shape, self.work, self.coefficients
        moved = tokens * work.hidden * _ACTIVATION_BYTES / shape.data
        seconds = 0.0
        if shape.tensor > 1:
            ring = 2.0 * (shape.tensor - 1) / shape.tensor * moved / self._link(shape.tensor)
            seconds += work.layers * _REDUCES_PER_LAYER * (ring + reached.collective_s)
        if shape.pipeline > 1:
            seconds += (shape.pipeline - 1) * (moved / self._link(shape.ranks) + reached.collective_s)
        ranks = shape.tensor * shape.data
        if shape.expert_parallel and ranks > 1 and work.experts:
            routed = moved * work.experts_per_token * (ranks - 1) / ranks / self._link(ranks)
            seconds += 2 * work.expert_layers * (routed + reached.collective_s)
        return seconds

    def _link(self, ranks: int) -> float:
        """Return the bytes per second that an exchange among `ranks` devices reaches."""
        device = self.device
        nominal = device.link_bytes_per_s if ranks <= device.per_node else device.network_bytes_per_s
        return nominal * self.coefficients.link

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Return the seconds to the first token of a prompt on an idle engine, in chunks of
        `shape.max_num_batched_tokens`. At least its last token is computed."""
        done = min(cached_tokens, prompt_tokens - 1)
        seconds = self.coefficients.request_s
        while done < prompt_tokens:
            tokens = min(self.shape.max_num_batched_tokens, prompt_tokens - done)
            last = done + tokens == prompt_tokens
            seconds += self.step(StepWork((PromptChunk(tokens, done, last),))).seconds
            done += tokens
        return seconds

    def decode(self, streams: int, context: float, *, lookahead: int = 0) -> StepTime:
        """Return the time of a step in which only `streams` streams of `context` tokens are decoded."""
        return self.step(StepWork(streams=streams, context=context, lookahead=lookahead))

    def kv_token_bytes(self) -> float:
        """Return the bytes of KV of one token of a long context, of all ranks together."""
        return sum(each.layers * each.elements for each in self.work.attention if not each.window) * (
            kv_element_bytes(self.shape)
        )

    def context_bytes(self, tokens: float) -> float:
        """Return the bytes that a context of `tokens` tokens keeps: KV, of windows where layers have one, and
        recurrent states."""
        return self.work.kv_elements(tokens) * kv_element_bytes(self.shape) + self.work.state_bytes

    def transfer_s(self, tokens: float, bytes_per_s: float, fixed_s: float = 0.0) -> float:
        """Return the seconds to move a context of `tokens` tokens to another engine, or to load it from a
        tier, that reaches `bytes_per_s` after `fixed_s` seconds."""
        return fixed_s + self.context_bytes(tokens) / bytes_per_s


def accepted_tokens(acceptance: float, lookahead: int) -> float:
    """Return the expected tokens of one round of speculation: those accepted of `lookahead` proposals, each
    accepted with probability `acceptance`, and one from the model itself (Leviathan et al., Fast Inference
    from Transformers via Speculative Decoding, 2023, equation 1)."""
    if acceptance >= 1.0:
        return lookahead + 1.0
    return (1.0 - acceptance ** (lookahead + 1)) / (1.0 - acceptance)
