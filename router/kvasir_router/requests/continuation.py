"""How a stream continues after the loss of its worker, without a token lost, repeated or invented.

    extend   the next worker gets prompt + output so far, and generates the rest. Exact where
             the next token depends on the tokens before it alone: greedy and unseeded sampling, any logit
             bias, repetition penalty (it counts prompt and output alike), stop strings, limits, logprobs.
             Parsed text and text that follows a grammar can be extended too: the next worker's
             parser reads the output so far, and its grammar accepts it.
    replay   the next worker starts again; what the client has is compared token by token and dropped. For
             output that depends on more than the tokens before: a seed (the generator's state is the number
             of draws), presence and frequency penalties, bad words (they count output only), a bound on
             reasoning, several choices. It takes as long as the output so far took to generate, and ends
             with a clean error if the engine's output differs.
    neither  sampling without a seed that would need a replay: the output would not be the same request's.

A sampled stream without a seed continues with new samples: as likely as any other continuation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvasir.core.requests import Continuation, Delta, Request, Sampling, ToolCallDelta, token_ids
from kvasir.native import StreamTokens


class ContinuationMode(StrEnum):
    """The ways to continue a stream."""

    EXTEND = "extend"
    REPLAY = "replay"
    NEITHER = "neither"


def way_on(sampling: Sampling) -> ContinuationMode:
    """Return the cheapest exact way to continue a stream that has begun."""
    greedy = sampling.temperature == 0
    drawn_by_seed = not greedy and sampling.seed is not None
    looks_at_output = (
        sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or bool(sampling.bad_words)
        or sampling.thinking_tokens is not None
    )
    if sampling.n == 1 and not (drawn_by_seed or looks_at_output):
        return ContinuationMode.EXTEND
    return ContinuationMode.REPLAY if greedy or drawn_by_seed else ContinuationMode.NEITHER


@dataclass(slots=True)
class PartLengths:
    """How much the client has of a parsed choice, in characters: content, reasoning, and the arguments of
    each tool call whose name was sent."""

    content: int = 0
    reasoning: int = 0
    calls: dict[int, int] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Add the parts of one more delta."""
        self.content += len(delta.text)
        self.reasoning += len(delta.reasoning)
        for call in delta.tool_calls:
            self.calls[call.index] = self.calls.get(call.index, 0) + len(call.arguments)

    def beyond(self, said: PartLengths, delta: Delta) -> Delta:
        """Return the part of `delta` beyond these parts, if a leg has sent `said` before it."""
        return replace(
            delta,
            text=delta.text[max(0, self.content - said.content) :],
            reasoning=delta.reasoning[max(0, self.reasoning - said.reasoning) :],
            tool_calls=tuple(self._calls_beyond(said, delta.tool_calls)),
        )

    def _calls_beyond(self, said: PartLengths, calls: tuple[ToolCallDelta, ...]) -> list[ToolCallDelta]:
        left: list[ToolCallDelta] = []
        at = dict(said.calls)
        for call in calls:
            had, made = self.calls.get(call.index), at.get(call.index, 0)
            at[call.index] = made + len(call.arguments)
            if had is None:
                left.append(call)
            elif arguments := call.arguments[max(0, had - made) :]:
                # The client has its name and id: engines draw another id for each attempt.
                left.append(ToolCallDelta(call.index, arguments=arguments))
        return left


class ChoiceOutput:
    """What the client has of one choice: `progress` counts its tokens and the characters of the engine's
    text, over both paths. `parts` counts the parsed parts of that text."""

    __slots__ = ("finished", "parts", "progress")

    def __init__(self, tokens: Iterable[int] = (), text_length: int = 0, finished: bool = False) -> None:
        self.progress = StreamTokens()
        self.progress.add(tokens, text_length)
        self.finished = finished
        self.parts: PartLengths | None = None

    def add(self, delta: Delta) -> None:
        """Add a delta that is sent to the client."""
        if delta.raw_length is None:
            self.progress.add(delta.token_ids, len(delta.text))
        else:
            self.progress.add(delta.token_ids, delta.raw_length)
            self.parts = self.parts or PartLengths()
            self.parts.add(delta)
        if delta.finish is not None:
            self.finished = True


def extended(request: Request, output: ChoiceOutput) -> tuple[Request, Continuation]:
    """Return the request whose prompt ends with the client's output of its only choice. Prompt logprobs,
    which were sent with the first delta, are not requested again."""
    sampling = request.sampling
    if sampling.prompt_logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=None)
    tokens = request.tokens + output.progress.tokens
    return (
        replace(request, tokens=tokens, sampling=sampling, block_hashes=request.block_hashes[:0]),
        Continuation(output.progress.count, output.progress.characters),
    )


class ReplayFilter:
    """Drops the output that the client has from a leg that started again, and detects differences. `outputs`
    grow with what passes."""

    def __init__(self, outputs: list[ChoiceOutput]) -> None:
        self._outputs = outputs
        self._tokens = [0] * len(outputs)
        self._text = [0] * len(outputs)
        self._said = [PartLengths() for _ in outputs]
        self._ended: set[int] = set()

    def at(self, index: int) -> int:
        """Number of tokens of this choice that the leg has generated."""
        return self._tokens[index]

    def ended(self, index: int) -> bool:
        """Whether the leg has ended this choice."""
        return index in self._ended

    @property
    def open_choices(self) -> int:
        """Choices that the leg has not ended."""
        return len(self._outputs) - len(self._ended)

    def fault(self, delta: Delta) -> str | None:
        """Return how `delta` differs from what the client has, or None."""
        output, at = self._outputs[delta.index], self._tokens[delta.index]
        made, count = at + len(delta.token_ids), output.progress.count
        had = output.progress.slice(at, made)
        if token_ids(delta.token_ids[: len(had)]) != had:
            return f"the engine did not repeat token {at} and those after it of choice {delta.index}"
        if output.finished and made > count:
            return f"choice {delta.index} goes on after token {count}, where it had ended"
        if delta.finish is not None and made < count:
            return f"choice {delta.index} ends at token {made}, of {count} that it had"
        return None

    def rest(self, delta: Delta) -> Delta:
        """Return the part of `delta` that the client does not have; its offset follows the client's output.
        The prompt's logprobs were sent with the first part."""
        index, output = delta.index, self._outputs[delta.index]
        count = output.progress.count
        known = min(len(delta.token_ids), count - self._tokens[index])
        read = max(0, output.progress.characters - self._text[index])
        self._tokens[index] += len(delta.token_ids)
        if delta.raw_length is None:
            self._text[index] += len(delta.text)
            left = replace(delta, text=delta.text[read:])
        else:
            self._text[index] += delta.raw_length
            left = self._parts_left(delta, output, read)
        if delta.finish is not None:
            self._ended.add(index)
        return replace(
            left,
            offset=count,
            token_ids=delta.token_ids[known:],
            logprobs=delta.logprobs[known:],
            finish=None if output.finished else delta.finish,
            stop_reason=None if output.finished else delta.stop_reason,
            prompt_logprobs=(),
        )

    def _parts_left(self, delta: Delta, output: ChoiceOutput, read: int) -> Delta:
        said = self._said[delta.index]
        left = (output.parts or PartLengths()).beyond(said, delta)
        said.add(delta)
        return replace(left, raw_length=max(0, (delta.raw_length or 0) - read))
