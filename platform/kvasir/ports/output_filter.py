"""What judges a model's output before its client sees it.

Judges may answer at once or later, so that one that looks for patterns and one that asks a classifier over
the network are the same to whoever holds the text back. Rulings come by call, on the event loop of the edge,
because a stream's pieces go out by calls too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class AnswerPart(StrEnum):
    """What of an answer a text is. Arguments of tool calls are their JSON text, each call by itself; a name
    that the model made up for one is a text too."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOLS = "tools"


class FilterAction(StrEnum):
    """What is to happen to a piece of text."""

    PASS = "pass"  # noqa: S105 - no password
    REDACT = "redact"
    END = "end"


@dataclass(frozen=True, slots=True)
class FilterSubject:
    """Whose text is judged. `model` is the name that the client sent, `tenant` "" for nobody."""

    model: str
    part: AnswerPart
    tenant: str = ""


RulingCallback = Callable[[int, FilterAction], None]
"""`rule(until, act)`: what becomes of the text from the end of the last ruling to `until`, a count of
characters from the text's beginning. END lets what comes before `until` through, as far as it was not ruled
on, and ends the choice there."""


class Judge(Protocol):
    """One text under one filter.

    Obligations: rulings go forward, without a gap; after END there are none. No more than the filter's
    `max_held_chars` of what was fed stay without a ruling. Nothing here raises or blocks.
    """

    def feed(self, text: str) -> None:
        """The text goes on. Rulings may come before this returns, or later."""
        ...

    def finish(self) -> None:
        """The text is whole: rulings on all of it are to come."""
        ...

    def expire(self) -> None:
        """Text has waited for too long: rule on all that was fed before this returns, as the filter's spec
        wants it. Judging may go on for what follows."""
        ...

    def close(self) -> None:
        """Nobody wants rulings any more, and none come after this. Idempotent."""
        ...


class OutputFilter(Protocol):
    """A filter, for all texts that it applies to."""

    name: str
    replacement: str
    """What stands for text that is redacted, once for each run of it."""
    max_held_chars: int
    max_held_s: float

    def applies(self, subject: FilterSubject) -> bool:
        """Whether it judges such texts. Cheap."""
        ...

    def judge(self, subject: FilterSubject, rule: RulingCallback, before: str = "") -> Judge:
        """Begin a text. Where another part has interrupted it, `before` is the end of what it had said: at
        least `max_held_chars` and one more, or all. That has been ruled on, and is not counted; what lies
        across the interruption is to be found."""
        ...

    async def close(self) -> None:
        """End what it has open. No text is judged any more."""
        ...
