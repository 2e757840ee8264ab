"""Compiles regular expressions to state graphs that match a stream in linear time.

Python's engine backtracks, so a pattern can take exponential time, and it cannot tell whether a partial text
can still become a match. Patterns of output filters are therefore compiled to a graph of states, which an
automaton follows with one step per character. Constructs that such a graph cannot express (back-references,
lookaround, possessive repeats) are rejected with the reason when the spec is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

MAX_STATES = 20_000
"""Limit for all patterns of one filter together, which bounds the memory of an automaton."""
MAX_REPEATED_STATES = 2_000
"""Limit for the counted repeats of one pattern, which are expanded. All of these states can be active at the
same time, so this bounds the time of a step."""
_MAX_NESTING = 50

_REPEAT = re.compile(r"\{(?:(\d+)(,)?(\d*)|(,)(\d*))\}")
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_NAMED = re.compile(r"\(\?P<\w+>")
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|.)", re.DOTALL
)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REFUSED = (
    ("(?=", "a lookahead"),
    ("(?!", "a lookahead"),
    ("(?<=", "a lookbehind"),
    ("(?<!", "a lookbehind"),
    ("(?P=", "a back-reference"),
    ("(?(", "a condition"),
    ("(?>", "an atomic group"),
)


class PatternAssertion(IntEnum):
    """An assertion, which consumes no character. TEXT_END is the end of the whole text: unlike in Python, `$`
    does not match before a final newline."""

    TEXT_START = 0
    TEXT_END = 1
    LINE_START = 2
    LINE_END = 3
    WORD_BOUNDARY = 4
    NOT_WORD_BOUNDARY = 5


class PatternError(ValueError):
    """The pattern is not a valid regular expression, or cannot be matched in linear time."""


@dataclass(frozen=True, slots=True)
class PatternState:
    """One state of a graph. It consumes one character that `test` matches, or checks an `assertion`, or
    neither; then any of `onward` follows."""

    onward: tuple[int, ...] = ()
    test: re.Pattern[str] | None = None
    assertion: PatternAssertion | None = None


@dataclass(frozen=True, slots=True)
class PatternGraph:
    """Patterns as one graph; a match of any of them starts at `start` and is complete at `accept`."""

    states: tuple[PatternState, ...]
    start: int
    accept: int

    @property
    def has_assertions(self) -> bool:
        """Whether a match depends on the text around it."""
        return any(state.assertion is not None for state in self.states)

    def first_char_tests(self) -> tuple[str, ...]:
        """Return the sources of tests; the first character of every match satisfies one of them."""
        found: dict[str, None] = {}
        for each in self._reached_at_once():
            test = self.states[each].test
            if test is not None:
                found[test.pattern] = None
        return tuple(found)

    def matches_empty(self) -> bool:
        """Whether the empty text matches."""
        return self.accept in self._reached_at_once()

    def _reached_at_once(self) -> set[int]:
        reached: set[int] = set()
        waiting = [self.start]
        while waiting:
            each = waiting.pop()
            if each not in reached:
                reached.add(each)
                if self.states[each].test is None:
                    waiting.extend(self.states[each].onward)
        return reached


@dataclass(frozen=True, slots=True)
class _Char:
    source: str


@dataclass(frozen=True, slots=True)
class _Place:
    assertion: PatternAssertion


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeated:
    item: _Node
    least: int
    most: int | None


_Node = _Char | _Place | _Sequence | _Choice | _Repeated


def build_graph(patterns: Iterable[str], *, ignore_case: bool = False) -> PatternGraph:
    """Return the graph of all `patterns`. Raises PatternError, whose message starts with the number of the
    pattern, for one that is invalid, matches the empty text, or exceeds the limit of states."""
    builder = _Builder()
    starts = []
    for number, pattern in enumerate(patterns):
        try:
            start = builder.add(_parse(pattern, ignore_case))
            whole = PatternGraph(tuple(builder.states), start, builder.accept)
            if whole.matches_empty():
                raise PatternError("it matches the empty text; let it begin with what must be there")
        except PatternError as error:
            raise PatternError(f"pattern {number} ({_shown(pattern)}): {error}") from error
        starts.append(start)
    first = builder.state(PatternState(tuple(starts)))
    return PatternGraph(tuple(builder.states), first, builder.accept)


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:60] + "…")


def _parse(pattern: str, ignore_case: bool) -> _Node:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"it is no regular expression: {error}") from error
    return _Parser(pattern, _Flags(ignore_case=ignore_case)).whole()


@dataclass(frozen=True, slots=True)
class _Flags:
    ignore_case: bool = False
    lines: bool = False
    dot_all: bool = False

    def changed(self, on: str, off: str) -> _Flags:
        for letter in on + off:
            if letter not in "imsu":
                raise PatternError(f"the flag {letter!r} is not served here; leave it out")
        names = {"i": "ignore_case", "m": "lines", "s": "dot_all"}
        changes = {names[letter]: True for letter in on if letter != "u"}
        changes |= {names[letter]: False for letter in off if letter != "u"}
        return replace(self, **changes)

    def char(self, source: str) -> _Char:
        letters = ("i" if self.ignore_case else "") + ("s" if self.dot_all else "")
        return _Char(f"(?{letters}:{source})" if letters else source)


class _Parser:
    """Parses a pattern that Python has validated."""

    def __init__(self, source: str, flags: _Flags) -> None:
        self._source = source
        self._flags = flags
        self._at = 0
        self._depth = 0

    def whole(self) -> _Node:
        if (found := _FLAGS.match(self._source)) and found[3] == ")":
            self._flags = self._flags.changed(found[1], found[2] or "")
            self._at = found.end()
        return self._choice()

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._source.startswith("|", self._at):
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            item = self._atom()
            if item is not None:
                items.append(self._repeats(item))
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _atom(self) -> _Node | None:
        source, at = self._source, self._at
        letter = source[at]
        if letter == "(":
            return self._group()
        if letter == "\\":
            return self._escape()
        if letter == "[":
            found = _CLASS.match(source, at)
            if found is None:
                raise PatternError(f"the set at {at} does not end")
            self._at = found.end()
            return self._flags.char(found[0])
        self._at += 1
        if letter == "^":
            return _Place(PatternAssertion.LINE_START if self._flags.lines else PatternAssertion.TEXT_START)
        if letter == "$":
            return _Place(PatternAssertion.LINE_END if self._flags.lines else PatternAssertion.TEXT_END)
        return self._flags.char(letter if letter == "." else re.escape(letter))

    def _escape(self) -> _Node:
        found = _ESCAPE.match(self._source, self._at)
        text = found[0] if found is not None else "\\"
        places = {
            "\\A": PatternAssertion.TEXT_START,
            "\\Z": PatternAssertion.TEXT_END,
            "\\b": PatternAssertion.WORD_BOUNDARY,
            "\\B": PatternAssertion.NOT_WORD_BOUNDARY,
        }
        if text[1:2] in "123456789":
            raise PatternError(f"{text} is a back-reference, which has no bounded cost; write it out")
        self._at += len(text)
        return _Place(places[text]) if text in places else self._flags.char(text)

    def _group(self) -> _Node | None:
        source, at, outer = self._source, self._at, self._flags
        for opening, what in _REFUSED:
            if source.startswith(opening, at):
                raise PatternError(f"{what} at {at} cannot be followed through a stream; do without it")
        if source.startswith("(?#", at):
            self._at = source.index(")", at) + 1
            return None
        if named := _NAMED.match(source, at):
            self._at = named.end()
        elif flags := _FLAGS.match(source, at):
            self._flags = outer.changed(flags[1], flags[2] or "")
            self._at = flags.end()
        else:
            self._at += 1
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise PatternError(f"groups are nested more than {_MAX_NESTING} deep")
        inner = self._choice()
        self._depth -= 1
        self._at += 1
        self._flags = outer
        return inner

    def _repeats(self, item: _Node) -> _Node:
        while (bounds := self._bounds()) is not None:
            if self._source.startswith("+", self._at):
                raise PatternError(f"the possessive repeat at {self._at} cannot be followed; leave out its +")
            if self._source.startswith("?", self._at):
                # Lazy or greedy makes no difference where every match counts.
                self._at += 1
            item = _Repeated(item, *bounds)
        return item

    def _bounds(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        letter = self._source[self._at : self._at + 1]
        if letter in simple:
            self._at += 1
            return simple[letter]
        found = _REPEAT.match(self._source, self._at)
        if found is None:
            return None
        self._at = found.end()
        least = int(found[1] or 0)
        if found[1] is not None and found[2] is None:
            return least, least
        most = found[3] or found[5]
        return least, int(most) if most else None


@dataclass(slots=True)
class _Builder:
    """Creates states from the end to the start, so that the successors of a state exist before it."""

    states: list[PatternState] = field(default_factory=lambda: [PatternState()])
    accept: int = 0
    _tests: dict[str, re.Pattern[str]] = field(default_factory=dict)
    _repeats: int = 0
    """Nesting depth of counted repeats at the current state."""
    _repeated_states: int = 0

    def add(self, node: _Node) -> int:
        self._repeated_states = 0
        return self._enter(node, self.accept)

    def state(self, state: PatternState) -> int:
        if len(self.states) >= MAX_STATES:
            raise PatternError(
                f"the patterns up to this one need more than {MAX_STATES} states; shorten its repeats, or "
                "give it a filter of its own"
            )
        if self._repeats:
            self._repeated_states += 1
            if self._repeated_states > MAX_REPEATED_STATES:
                raise PatternError(
                    f"its counted repeats need more than {MAX_REPEATED_STATES} states; use *, + or smaller "
                    "counts"
                )
        self.states.append(state)
        return len(self.states) - 1

    def _enter(self, node: _Node, onward: int) -> int:
        """Return the start state of `node`, which is followed by `onward`."""
        match node:
            case _Char(source):
                test = self._tests.get(source)
                if test is None:
                    test = self._tests[source] = re.compile(source)
                return self.state(PatternState((onward,), test=test))
            case _Place(assertion):
                return self.state(PatternState((onward,), assertion=assertion))
            case _Sequence(items):
                return self._enter_all(items, onward)
            case _Choice(options):
                return self.state(PatternState(tuple(self._enter(each, onward) for each in options)))
            case _Repeated(item, least, most):
                return self._enter_repeated(item, least, most, onward)

    def _enter_all(self, items: Sequence[_Node], onward: int) -> int:
        for item in reversed(items):
            onward = self._enter(item, onward)
        return onward

    def _enter_repeated(self, item: _Node, least: int, most: int | None, onward: int) -> int:
        if most is None:
            again = self.state(PatternState())
            self.states[again] = PatternState((self._enter(item, again), onward))
            onward = again
        counted = least > 1 or (most or 0) > 1
        self._repeats += counted
        if most is not None:
            after = onward
            for _ in range(most - least):
                onward = self.state(PatternState((self._enter(item, onward), after)))
        for _ in range(least):
            onward = self._enter(item, onward)
        self._repeats -= counted
        return onward
