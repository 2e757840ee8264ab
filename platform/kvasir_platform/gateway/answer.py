"""The pieces that streamed and whole answers share: identity, usage, logprobs, finish reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, FinishReason, PositionLogprobs, TokenLogprob, Usage

#: How OpenAI calls the ends that it knows; others end in an error.
FINISH: dict[FinishReason, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer repeats. `created` is Unix time; `logprobs` the number of
    alternatives to show, None for none; `choices` how many there will be."""

    id: str
    created: int
    model: str
    choices: int
    logprobs: int | None = None
    include_usage: bool = False


class Answer(Protocol):
    """Turns deltas into an API answer on one exchange."""

    def delta(self, index: int, delta: Delta) -> None:
        """Take what a step added to choice `index`."""
        ...

    def finish(self, usage: Usage, timing: bytes) -> None:
        """All choices have ended. `timing` is a Server-Timing header line or empty."""
        ...

    def fail(self, error: KvasirError) -> None:
        """The request has ended badly."""
        ...


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def add_usage(first: Usage, second: Usage) -> Usage:
    """The sum of two legs."""
    return Usage(
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        transferred_tokens=first.transferred_tokens + second.transferred_tokens,
        transferred_bytes=first.transferred_bytes + second.transferred_bytes,
        output_tokens=first.output_tokens + second.output_tokens,
    )


def chat_logprobs(positions: Sequence[PositionLogprobs], top: int) -> dict[str, Any]:
    """Logprobs as chat completions show them."""
    return {
        "content": [
            {**_candidate(p.sampled), "top_logprobs": [_candidate(c) for c in p.top[:top]]} for p in positions
        ],
        "refusal": None,
    }


def completion_logprobs(positions: Sequence[PositionLogprobs], top: int, offset: int) -> dict[str, Any]:
    """Logprobs as completions show them; `offset` is where the first token begins in the text."""
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.sampled.token)
    return {
        "text_offset": offsets,
        "tokens": [p.sampled.token for p in positions],
        "token_logprobs": [p.sampled.logprob for p in positions],
        "top_logprobs": [{c.token: c.logprob for c in (*p.top[:top], p.sampled)} for p in positions],
    }


def _candidate(candidate: TokenLogprob) -> dict[str, Any]:
    return {
        "token": candidate.token,
        "logprob": candidate.logprob,
        "bytes": list(candidate.token.encode()),
    }
