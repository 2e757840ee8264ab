"""The texts of a request and of its copy, as far as they are compared."""

from __future__ import annotations

from typing import Final

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Usage
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane
from kvasir_platform.gateway.openai.answer import Answer

_MAX_CHARS: Final = 64 << 10


class ComparedText:
    """The beginning of an answer: its content, reasoning and tool calls. `ended`: it has come to its end."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._chars = 0
        self.ended = False

    def add(self, delta: Delta) -> None:
        """Add what a step added."""
        calls = (call.name + call.arguments for call in delta.tool_calls)
        for part in (delta.reasoning, delta.text, *calls):
            if part and self._chars < _MAX_CHARS:
                self._parts.append(part)
                self._chars += len(part)

    def agrees(self, other: ComparedText) -> bool:
        """Return whether one text is the beginning of the other: they may have had different limits."""
        mine, theirs = "".join(self._parts), "".join(other._parts)
        return mine.startswith(theirs) or theirs.startswith(mine)


class TappedAnswer:
    """An answer whose text is kept in `text`."""

    def __init__(self, answer: Answer, text: ComparedText) -> None:
        self._answer = answer
        self._text = text

    def delta(self, index: int, delta: Delta) -> None:
        """See Answer."""
        self._text.add(delta)
        self._answer.delta(index, delta)

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """See Answer: a fast path would bypass the comparison."""
        return None

    def finish(self, usage: Usage, timing: bytes) -> None:
        """See Answer."""
        self._answer.finish(usage, timing)
        self._text.ended = True

    def fail(self, error: KvasirError) -> None:
        """See Answer."""
        self._answer.fail(error)
