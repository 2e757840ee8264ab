"""Code shared by streamed and whole answers: the data of a call, and the conversion to OpenAI's format.

Where OpenAI's API is undefined, the format is vLLM's. Reasoning has two fields, `reasoning` as in vLLM and
OpenRouter and `reasoning_content` as in DeepSeek: clients read one of the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvasir.core.errors import KvasirError
from kvasir.core.requests import (
    Delta,
    FinishReason,
    OutputParsing,
    PositionLogprobs,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from kvasir.core.values import value
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane

Positions = Sequence[PositionLogprobs | None]

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTENT_FILTER: "content_filter",
}
_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The parts of a prompt that an answer can show: its ids, its text, and the text of its first token, for
    which an engine returns no logprob."""

    tokens: array[int]
    text: str = ""
    first: str = ""


@value
class AnswerHead:
    """The data of a call that an answer needs.

    `created` is Unix time; `choices` the number of choices, equally many for each prompt. `logprobs` is the
    number of alternatives to show, None for no logprobs at all, `prompt_logprobs` the same for prompts;
    `tokens_as_ids` names tokens of the output by `token_id:N`. `prompts` may be empty unless `echo`,
    `return_token_ids`, `prompt_logprobs` or `continuous_usage` is set. With `prompt_only`, generated text is
    dropped. `parsing` is that of the request; with `legacy_functions` a call is returned as
    `function_call`. `stops` are the stop strings of the request. `prompt_tokens` counts the tokens of all
    prompts; `context_bound`: the context has room for fewer output tokens than the client asked for.
    """

    id: str
    created: int
    model: str
    choices: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    prompt_only: bool = False
    return_token_ids: bool = False
    parsing: OutputParsing | None = None
    legacy_functions: bool = False
    stops: tuple[str, ...] = ()
    prompt_tokens: int = 0
    context_bound: bool = False

    @property
    def hides_reasoning(self) -> bool:
        """Whether reasoning is hidden from the client, with the logprobs and ids that would reveal it."""
        return self.parsing is not None and not self.parsing.reasoning

    @property
    def shown_logprobs(self) -> int | None:
        """`logprobs`, unless they would reveal hidden reasoning."""
        return None if self.hides_reasoning else self.logprobs

    @property
    def shows_token_ids(self) -> bool:
        """`return_token_ids`, unless they would reveal hidden reasoning."""
        return self.return_token_ids and not self.hides_reasoning

    def prompt_of(self, index: int) -> int:
        """Return the index in `prompts` of the prompt of choice `index`."""
        return index * len(self.prompts) // self.choices


class Answer(Protocol):
    """Turns deltas into an API answer on one exchange.

    Any number of `delta`, then exactly one of `finish` and `fail`. An answer may wrap another; to end one
    choice, a wrapper passes a delta with finish CONTENT_FILTER, nothing of that choice after it, and calls
    `Generation.end_choice`.
    """

    def delta(self, index: int, delta: Delta) -> None:
        """Add what a step added to choice `index`."""
        ...

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """Return a fast path for the next deltas of choice `index`, measured in `gaps`; None if they must be
        processed here."""
        ...

    def finish(self, usage: Usage, timing: bytes) -> None:
        """All choices have ended. `timing` is a Server-Timing header line or empty."""
        ...

    def fail(self, error: KvasirError) -> None:
        """End with an error."""
        ...


def finish_reason(head: AnswerHead, finish: FinishReason | None, called: bool) -> str | None:
    """Return OpenAI's name of a finish reason; None if it has none. `called`: the choice made tool calls.

    As in OpenAI's API and in vLLM, calls change the reason only for a natural stop. If the client named the
    function, it stays `stop`.
    """
    if finish is FinishReason.STOP and called and head.parsing is not None and not head.parsing.function:
        return "function_call" if head.legacy_functions else "tool_calls"
    return None if finish is None else _FINISH.get(finish)


def stop_reason(head: AnswerHead, reason: str) -> str | int:
    """Return what ended a choice: a stop string as text, a token by its id."""
    return int(reason) if reason.isdecimal() and reason not in head.stops else reason


def wanted_calls(head: AnswerHead, calls: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return the pieces for the client: only the first call if parallel calls are disabled."""
    one = head.legacy_functions or (head.parsing is not None and not head.parsing.parallel_tool_calls)
    return [call for call in calls if not one or call.index == 0]


def usage_object(usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage object. `reasoning_tokens` None: unknown."""
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if reasoning_tokens is not None:
        shown["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return shown


def add_usage(first: Usage, second: Usage) -> Usage:
    """Return the sum of two legs."""
    return Usage(
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        transferred_tokens=first.transferred_tokens + second.transferred_tokens,
        transferred_bytes=first.transferred_bytes + second.transferred_bytes,
        output_tokens=first.output_tokens + second.output_tokens,
        tier_tokens=first.tier_tokens + second.tier_tokens,
    )


def chat_logprobs(positions: Sequence[PositionLogprobs], head: AnswerHead) -> dict[str, Any] | None:
    """Return logprobs in the format of chat completions; None if none are shown."""
    top = head.shown_logprobs
    if top is None:
        return None
    by_id = head.tokens_as_ids
    return {
        "content": [
            {
                **_candidate(position.sampled, by_id),
                "top_logprobs": [_candidate(each, by_id) for each in position.top[:top]],
            }
            for position in positions
        ],
        "refusal": None,
    }


def completion_logprobs(
    positions: Positions, head: AnswerHead, index: int, offset: int
) -> tuple[dict[str, Any] | None, int]:
    """Return logprobs in the format of completions, None if none are shown, and where the next token begins
    in the text of choice `index`; the first of these begins at `offset`. A position that is None is the first
    token of the prompt."""
    top = head.shown_logprobs
    if top is None:
        return None, offset
    by_id = head.tokens_as_ids
    offsets: list[int] = []
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for position in positions:
        offsets.append(offset)
        if position is None:
            prompt = head.prompts[head.prompt_of(index)]
            text = prompt.first
            tokens.append(_name(prompt.tokens[0], text, by_id))
            logprobs.append(None)
            tops.append(None)
        else:
            sampled = position.sampled
            text = sampled.token
            tokens.append(_name(sampled.token_id, text, by_id))
            logprobs.append(_finite(sampled.logprob))
            tops.append(
                {
                    _name(each.token_id, each.token, by_id): _finite(each.logprob)
                    for each in (*position.top[:top], sampled)
                }
            )
        offset += len(text)
    shown = {"text_offset": offsets, "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}
    return shown, offset


def prompt_logprobs(positions: Positions, head: AnswerHead) -> list[dict[str, Any] | None]:
    """Return logprobs of a prompt in vLLM's format: for each token a map of token id to logprob, rank and
    text, its own first. The rank is None for a token that is not among the best."""
    top = head.prompt_logprobs or 0
    return [None if each is None else _ranked(each, top) for each in positions]


def without_output(delta: Delta) -> Delta:
    """Return `delta` for a call that requests its prompt only."""
    return replace(delta, text="", token_ids=(), logprobs=())


def prompt_ids(head: AnswerHead, index: int) -> list[int]:
    """Return the ids of the prompt of choice `index`."""
    return head.prompts[head.prompt_of(index)].tokens.tolist()


def _ranked(position: PositionLogprobs, top: int) -> dict[str, Any]:
    sampled = position.sampled
    best = position.top[:top]
    ranks = {each.token_id: rank for rank, each in enumerate(position.top, 1)}
    shown = {}
    for each in (sampled, *(one for one in best if one.token_id != sampled.token_id)):
        shown[str(each.token_id)] = {
            "logprob": _finite(each.logprob),
            "rank": ranks.get(each.token_id),
            "decoded_token": each.token,
        }
    return shown


def _candidate(candidate: TokenLogprob, by_id: bool) -> dict[str, Any]:
    return {
        "token": _name(candidate.token_id, candidate.token, by_id),
        "logprob": _finite(candidate.logprob),
        "bytes": list(candidate.token.encode()),
    }


def _name(token_id: int, text: str, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else text


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
