"""Patterns and grammars as trees, whatever syntax they were written in."""

from __future__ import annotations

from dataclasses import dataclass

OTHER = 1 << 128
"""All characters beyond ASCII, as one."""
ALL = (OTHER << 1) - 1
"""All characters. A set of characters is an integer with a bit for each."""
NEWLINE = 1 << 10
DIGITS = ((1 << 10) - 1) << ord("0")
WORDS = DIGITS | ((1 << 26) - 1) << ord("A") | ((1 << 26) - 1) << ord("a") | 1 << ord("_")
SPACES = 1 << 32 | ((1 << 5) - 1) << 9


class TooCostlyError(ValueError):
    """A pattern or grammar that cannot be matched at a bounded cost per token; the message says why."""


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character out of a set."""

    chars: int


@dataclass(frozen=True, slots=True)
class Literal:
    """A text that is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """One after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ChoiceNode:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class RepeatNode:
    """From `least` to `most` times; None: without end."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class RuleNode:
    """A rule of the grammar, by its name."""

    name: str


Node = CharSet | Literal | SequenceNode | ChoiceNode | RepeatNode | RuleNode
NOTHING = SequenceNode(())


def char(letter: str) -> int:
    """Return the set that holds `letter` alone."""
    code = ord(letter)
    return 1 << code if code < 128 else OTHER


def char_range(first: str, last: str) -> int:
    """Return the set of characters from `first` to `last`."""
    low, high = ord(first), ord(last)
    found = OTHER if high >= 128 else 0
    if low < 128 and low <= high:
        found |= ((1 << (min(high, 127) - low + 1)) - 1) << low
    return found


def in_turn(items: list[Node]) -> Node:
    """Return the items one after the other."""
    return items[0] if len(items) == 1 else SequenceNode(tuple(items))


def one_of(options: list[Node]) -> Node:
    """Return one of the options."""
    return options[0] if len(options) == 1 else ChoiceNode(tuple(options))


class Meter:
    """Counts what is parsed and judged for one request, so that the judgement itself is bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def count(self, parts: int = 1) -> None:
        """Raise TooCostlyError if more than the limit has been counted."""
        self.used += parts
        if self.used > self._limit:
            raise TooCostlyError(f"it has more than {self._limit} parts")
