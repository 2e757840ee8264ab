"""What an experiment measures, as steps of an engine that are known to have run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.performance.step import PromptChunk, StepWork

_LEAST_BUSY = 0.1
"""A smaller part says nothing of the time beside it."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measurement that `steps` and the arrival of `requests` explain: each step and how often it ran, and
    the seconds of all. `kind` names it in residuals."""

    kind: str
    steps: tuple[tuple[StepWork, float], ...]
    requests: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """The transfer of one prompt's KV between two engines."""

    moved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BusySample:
    """A request that came while `streams` streams of `context` tokens ran: `seconds` to its first token, or
    with engines apart of its part on one of them, and the chunk of its prompt that this part computes."""

    chunk: PromptChunk
    streams: int
    context: float
    seconds: float


@dataclass(slots=True)
class CalibrationSamples:
    """The samples of one deployment. `prefill` are of the engine that computes prompts and `decode` of the
    one that generates: the same with one pool. `apart` says that they are two. `slowed` are the times of
    steps of each engine while the other computed, divided by those while it did not."""

    apart: bool
    prefill: list[StepSample] = field(default_factory=list)
    decode: list[StepSample] = field(default_factory=list)
    transfers: list[TransferTimes] = field(default_factory=list)
    prefill_busy: list[BusySample] = field(default_factory=list)
    decode_busy: list[BusySample] = field(default_factory=list)
    prefill_slowed: list[float] = field(default_factory=list)
    decode_slowed: list[float] = field(default_factory=list)


def prefill_sample(prompt_tokens: int, cached_tokens: int, seconds: float, *, budget: int) -> StepSample:
    """Return the sample of a prompt alone: `seconds` to its first token, in chunks of `budget` tokens."""
    steps, done = [], min(cached_tokens, prompt_tokens - 1)
    while done < prompt_tokens:
        tokens = min(budget, prompt_tokens - done)
        chunk = PromptChunk(tokens, done, last=done + tokens == prompt_tokens)
        steps.append((StepWork((chunk,)), 1.0))
        done += tokens
    return StepSample("cached prompts" if cached_tokens else "prompts", tuple(steps), 1.0, seconds)


def burst_sample(prompts: int, prompt_tokens: int, seconds: float, *, budget: int) -> StepSample:
    """Return the sample of prompts that arrive together: `seconds` to the first token of the last one. The
    first is computed alone, and the others in as few steps as their tokens need. Each has one token of output
    and ends with its step, so no streams run beside them."""
    chunk, others = PromptChunk(prompt_tokens), prompts - 1
    number = math.ceil(others * prompt_tokens / budget)
    shares = [(at + 1) * others // number - at * others // number for at in range(number)]
    steps = tuple((StepWork((chunk,) * share), 1.0) for share in (1, *shares) if share)
    return StepSample("bursts of prompts", steps, 1.0, seconds)


def decode_sample(streams: int, context: float, itl_s: float) -> StepSample:
    """Return the sample of streams alone: the mean time between their tokens."""
    return StepSample("decoding", ((StepWork(streams=streams, context=context), 1.0),), 0.0, itl_s)


def mixed_sample(streams: int, context: float, prompts: Mapping[int, float], itl_s: float) -> StepSample:
    """Return the sample of streams beside prompts on one engine: the mean time between tokens. `prompts` says
    by their length how many there are for each token of a stream. Each has a step of its own, which gives a
    token of each stream as well; beyond one for each token, the least frequent are left out."""
    steps, left = [], 1.0
    for tokens, number in sorted(prompts.items(), key=lambda each: -each[1]):
        share = min(left, number)
        steps.append((StepWork((PromptChunk(tokens),), streams, context), share))
        left -= share
    steps.append((StepWork(streams=streams, context=context), left))
    return StepSample("prompts beside streams", tuple(steps), 0.0, itl_s)


def hand_over_sample(prompt_tokens: int, seconds: float) -> StepSample:
    """Return the sample of a request whose KV came from another engine: `seconds` from the end of its
    prefill to its first token, without the transfer."""
    step = StepWork((PromptChunk(1, prompt_tokens - 1),))
    return StepSample("hand-offs", ((step, 1.0),), 1.0, seconds)


def slowed_by(seconds: float, alone_s: float, busy: float) -> float:
    """Return by which part of its time a step is longer while another engine computes, which it did for the
    part `busy` of a load: steps took `seconds` on average then, and `alone_s` without the other engine."""
    return max(0.0, seconds / alone_s - 1.0) / min(1.0, max(_LEAST_BUSY, busy))
