"""How a stream goes on when the worker that made it is lost: without a token lost, repeated or invented.

    extend   the next worker is given prompt + output so far, and generates what comes after. Exact wherever
             the next token depends on the tokens before it alone: greedy and unseeded sampling, any logit
             bias, repetition penalty (it counts prompt and output alike), stop strings, limits, logprobs.
    replay   the next worker begins anew; what the client has is compared token by token and dropped. For
             what depends on more than the tokens before: a seed (the generator's state is the number of
             draws), presence and frequency penalties (they count output only), several choices. It takes as
             long as the output so far took to make, and ends with a clean error where an engine does not
             repeat itself.
    neither  draws without a seed that also need the second way: what follows would not be the same request's.

A sampled stream without a seed goes on with fresh draws: as likely as any other continuation.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from enum import StrEnum

from kvasir.core.requests import Continuation, Delta, Request, Sampling, token_ids


class Way(StrEnum):
    """How to go on."""

    EXTEND = "extend"
    REPLAY = "replay"
    NEITHER = "neither"


def way_on(sampling: Sampling) -> Way:
    """The cheapest exact way for a stream that has begun."""
    greedy = sampling.temperature == 0
    drawn_by_seed = not greedy and sampling.seed is not None
    counts_output = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if sampling.n == 1 and not drawn_by_seed and not counts_output:
        return Way.EXTEND
    return Way.REPLAY if greedy or drawn_by_seed else Way.NEITHER


@dataclass(slots=True)
class Output:
    """What the client has of one choice: its tokens, and how long the engine's text of it is."""

    tokens: array[int]
    text_length: int = 0
    finished: bool = False

    def add(self, delta: Delta) -> None:
        """The client is sent this."""
        self.tokens.extend(delta.token_ids)
        self.text_length += len(delta.text) if delta.raw_length is None else delta.raw_length
        self.finished = self.finished or delta.finish is not None


def extended(request: Request, output: Output) -> tuple[Request, Continuation]:
    """The request whose prompt ends with what the client has of its only choice."""
    tokens = request.tokens + output.tokens
    return (
        replace(request, tokens=tokens, block_hashes=request.block_hashes[:0]),
        Continuation(len(output.tokens), output.text_length),
    )


class Replay:
    """Drops from a leg that began anew what the client has, and tells where it differs. `outputs` grow with
    what passes."""

    def __init__(self, outputs: list[Output]) -> None:
        self._outputs = outputs
        self._tokens = [0] * len(outputs)
        self._text = [0] * len(outputs)
        self._ended: set[int] = set()

    def at(self, index: int) -> int:
        """How many tokens of this choice the leg has made."""
        return self._tokens[index]

    def ended(self, index: int) -> bool:
        """Whether the leg has ended this choice."""
        return index in self._ended

    @property
    def open_choices(self) -> int:
        """Choices that the leg has not ended."""
        return len(self._outputs) - len(self._ended)

    def fault(self, delta: Delta) -> str | None:
        """How `delta` differs from what the client has, or None."""
        output, at = self._outputs[delta.index], self._tokens[delta.index]
        made = at + len(delta.token_ids)
        had = output.tokens[at:made]
        if token_ids(delta.token_ids[: len(had)]) != had:
            return f"the engine did not repeat token {at} and those after it of choice {delta.index}"
        if output.finished and made > len(output.tokens):
            return f"choice {delta.index} goes on after token {len(output.tokens)}, where it had ended"
        if delta.finish is not None and made < len(output.tokens):
            return f"choice {delta.index} ends at token {made}, of {len(output.tokens)} that it had"
        return None

    def rest(self, delta: Delta) -> Delta:
        """The part of `delta` that the client does not have; its offset follows what the client has."""
        index, output = delta.index, self._outputs[delta.index]
        known = min(len(delta.token_ids), len(output.tokens) - self._tokens[index])
        read = max(0, output.text_length - self._text[index])
        self._tokens[index] += len(delta.token_ids)
        self._text[index] += len(delta.text)
        if delta.finish is not None:
            self._ended.add(index)
        return replace(
            delta,
            offset=len(output.tokens),
            token_ids=delta.token_ids[known:],
            text=delta.text[read:],
            logprobs=delta.logprobs[known:],
            finish=None if output.finished else delta.finish,
            stop_reason=None if output.finished else delta.stop_reason,
        )
