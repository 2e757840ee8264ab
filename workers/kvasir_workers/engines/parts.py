"""What a choice's text is taken apart into, whichever engine made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvasir.core.requests import Delta, ToolCallDelta


@dataclass(frozen=True, slots=True)
class StepParts:
    """What one step of a choice says. `taken` is how many characters of its text have been taken in; what is
    held back because it may be the beginning of a mark counts among them."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    taken: int = 0


class PartsParser(Protocol):
    """The parser of one choice, from its first token to its last."""

    def take(self, text: str, token_ids: Sequence[int], *, finished: bool) -> StepParts:
        """The step's text and tokens, which may be about different parts of the output; after the step with
        `finished` there is no other. Never raises: what cannot be taken apart is content."""
        ...

    def reasoning_tokens(self) -> int:
        """How many of the tokens so far were reasoning."""
        ...


def taken_apart(delta: Delta, parser: PartsParser) -> Delta:
    """`delta`, with its text as `parser` takes it apart."""
    ended = delta.finish is not None
    parts = parser.take(delta.text, delta.token_ids, finished=ended)
    return replace(
        delta,
        text=parts.text,
        reasoning=parts.reasoning,
        tool_calls=parts.tool_calls,
        raw_length=parts.taken,
        reasoning_tokens=parser.reasoning_tokens() if ended else 0,
    )
