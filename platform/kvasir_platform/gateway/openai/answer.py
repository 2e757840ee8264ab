"""What streamed and whole answers share: who they are of, and how OpenAI spells what an engine said.

Where OpenAI's API is silent, vLLM's is followed. Reasoning is spelled twice, `reasoning` as vLLM and
OpenRouter do and `reasoning_content` as DeepSeek does: clients read one of the two, and those that know both
take one.
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
"""What stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an answer can show of a prompt: its ids, its text, and the text of its first token, for which an
    engine gives no logprob."""

    tokens: array[int]
    text: str = ""
    first: str = ""


@value
class AnswerHead:
    """What an answer needs to know of its call.

    `created` is Unix time; `choices` how many there will be, as many for each prompt. `logprobs` is the
    number of alternatives to show, None for no logprobs at all, `prompt_logprobs` the same for prompts;
    `tokens_as_ids` names tokens of the output by `token_id:N`. `prompts` may be empty unless `echo`,
    `return_token_ids`, `prompt_logprobs` or `continuous_usage` is set. With `prompt_only`, whatever was
    generated is dropped. `parsing` is the request's own; with `legacy_functions` a call is spelled as
    `function_call`. `stops` are the stop strings of the request.
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

    @property
    def hides_reasoning(self) -> bool:
        """Whether reasoning is kept from the client, and with it logprobs and ids, which would tell it."""
        return self.parsing is not None and not self.parsing.reasoning

    @property
    def shown_logprobs(self) -> int | None:
        """`logprobs`, unless they would tell what is hidden."""
        return None if self.hides_reasoning else self.logprobs

    @property
    def shows_token_ids(self) -> bool:
        """`return_token_ids`, unless they would tell what is hidden."""
        return self.return_token_ids and not self.hides_reasoning

    def prompt_of(self, index: int) -> int:
        """Which of `prompts` choice `index` belongs to."""
        return index * len(self.prompts) // self.choices


class Answer(Protocol):
    """Turns deltas into an API answer on one exchange.

    Any number of `delta`, then exactly one of `finish` and `fail`. One may be wrapped around another; to end
    a choice on its own, a wrapper passes a delta with finish CONTENT_FILTER, nothing of that choice after it,
    and tells `Generation.end_choice`.
    """

    def delta(self, index: int, delta: Delta) -> None:
        """Take what a step added to choice `index`."""
        ...

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """A fast path for what comes next of choice `index`, measured in `gaps`; None where that has to be
        looked at here."""
        ...

    def finish(self, usage: Usage, timing: bytes) -> None:
        """All choices have ended. `timing` is a Server-Timing header line or empty."""
        ...

    def fail(self, error: KvasirError) -> None:
        """The request has ended badly."""
        ...


def finish_reason(head: AnswerHead, finish: FinishReason | None, called: bool) -> str | None:
    """OpenAI's word for an end; None for those that it has none for. `called`: the choice made tool calls.

    As in OpenAI's API and in vLLM, calls change the word for a natural stop only, and not where the client
    itself named the function, for which it is `stop`.
    """
    if finish is FinishReason.STOP and called and head.parsing is not None and not head.parsing.function:
        return "function_call" if head.legacy_functions else "tool_calls"
    return None if finish is None else _FINISH.get(finish)


def stop_reason(head: AnswerHead, reason: str) -> str | int:
    """What ended a choice: a stop string as it is, a token by its id."""
    return int(reason) if reason.isdecimal() and reason not in head.stops else reason


def wanted_calls(head: AnswerHead, calls: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Those pieces that the client is to have: of the first call only where it wants one at a time."""
    one = head.legacy_functions or (head.parsing is not None and not head.parsing.parallel_tool_calls)
    return [call for call in calls if not one or call.index == 0]


def usage_object(usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object. `reasoning_tokens` None: nothing is known of reasoning."""
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
    """The sum of two legs."""
    return Usage(
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        transferred_tokens=first.transferred_tokens + second.transferred_tokens,
        transferred_bytes=first.transferred_bytes + second.transferred_bytes,
        output_tokens=first.output_tokens + second.output_tokens,
        tier_tokens=first.tier_tokens + second.tier_tokens,
    )


def chat_logprobs(positions: Sequence[PositionLogprobs], head: AnswerHead) -> dict[str, Any] | None:
    """Logprobs as chat completions show them; None where none are shown."""
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
    """Logprobs as completions show them, None where none are shown, and where the next token begins in the
    text of choice `index`; the first of these begins at `offset`. A position that is None is the first token
    of the prompt."""
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
    """Logprobs of a prompt in vLLM's shape: for each token a map of token id to logprob, rank and text, its
    own first. The rank is None for one that is not among the best."""
    top = head.prompt_logprobs or 0
    return [None if each is None else _ranked(each, top) for each in positions]


def without_output(delta: Delta) -> Delta:
    """`delta` for a call that wants its prompt only."""
    return replace(delta, text="", token_ids=(), logprobs=())


def prompt_ids(head: AnswerHead, index: int) -> list[int]:
    """The ids of the prompt of choice `index`."""
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
