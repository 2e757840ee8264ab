"""The parts into which a choice's text is parsed, for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvasir.core.requests import Delta, ToolCallDelta


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parsed output of one step of a choice. `taken` is the number of characters of its text that were
    consumed, including those held back because they may begin a mark."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    taken: int = 0


class PartsParser(Protocol):
    """The parser of one choice, from its first token to its last."""

    def take(self, text: str, token_ids: Sequence[int], *, finished: bool) -> StepParts:
        """Parse a step's text and tokens, which may cover different parts of the output; no step follows the
        one with `finished`. Never raises: text that cannot be parsed is content."""
        ...

    def reasoning_tokens(self) -> int:
        """Return how many of the tokens so far were reasoning."""
        ...


def taken_apart(delta: Delta, parser: PartsParser) -> Delta:
    """Return `delta` with its text parsed by `parser`."""
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
