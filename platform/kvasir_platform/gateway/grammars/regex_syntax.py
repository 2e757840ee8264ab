"""Reads regular expressions, as far as their cost depends on it.

The dialects of compilers differ, and the worker's own compiler validates the pattern. So nothing is refused
here for its syntax: what is unknown counts as any one character, and an assertion as nothing.
"""

from __future__ import annotations

import re

from kvasir_platform.gateway.grammars.nodes import (
    ALL,
    DIGITS,
    NEWLINE,
    NOTHING,
    OTHER,
    SPACES,
    WORDS,
    CharSet,
    Literal,
    Meter,
    Node,
    RepeatNode,
    TooCostlyError,
    char,
    char_range,
    in_turn,
    one_of,
)

MAX_NESTING = 50
_ESCAPE = (
    r"\\(?:[pPN]\{[^}]*\}|u\{[^}]*\}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}"
    r"|c[A-Za-z]|k<[^>]*>|.)"
)
_TOKEN = re.compile(
    r"[\w ,;:=@#%&'\"<>/~`!-]{2,}(?![*+?{])"
    rf"|{_ESCAPE}"
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]"
    r"|\(\?(?:<?[=!]|P?<[^>]*>|[a-zA-Z-]*[:)])?"
    r"|\{\d*(?:,\d*)?\}|.",
    re.DOTALL,
)
_IN_SET = re.compile(rf"({_ESCAPE}|.)(?:-({_ESCAPE}|[^\]]))?", re.DOTALL)
_BOUNDS = re.compile(r"\{(\d*)(,?)(\d*)\}")
_SIMPLE: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_COUNT = 1 << 20
_CLASSES = {
    "d": DIGITS,
    "D": ALL & ~DIGITS,
    "w": WORDS,
    "W": ALL & ~WORDS,
    "s": SPACES,
    "S": ALL & ~SPACES,
}
_CATEGORIES = {"L": WORDS & ~DIGITS & ~char("_") | OTHER, "N": DIGITS | OTHER, "Z": char(" ") | OTHER}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LOOK = ("(?=", "(?!", "(?<=", "(?<!")


def parse_regex(pattern: str, meter: Meter) -> Node:
    """Return the tree of `pattern`. Raise TooCostlyError if it is too large or nested too deeply."""
    tokens = _TOKEN.findall(pattern)
    meter.count(len(tokens))
    return _Parser(tokens).choice(0)


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._sets: dict[str, CharSet] = {}

    def choice(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise TooCostlyError(f"its groups are nested more than {MAX_NESTING} deep")
        options: list[Node] = []
        items: list[Node] = []
        while self._at < len(self._tokens):
            part = self._tokens[self._at]
            if part == ")" and depth:
                break
            self._at += 1
            if part == "|":
                options.append(in_turn(items))
                items = []
            else:
                item = self._group(part, depth) if part[0] == "(" else self._atom(part)
                items.append(self._repeats(item))
        options.append(in_turn(items))
        return one_of(options)

    def _group(self, part: str, depth: int) -> Node:
        if part.startswith("(?") and part.endswith(")"):
            return NOTHING
        inner = self.choice(depth + 1)
        self._at += 1
        return NOTHING if part in _LOOK else inner

    def _atom(self, part: str) -> Node:
        if part == ".":
            return CharSet(ALL & ~NEWLINE)
        if part in "^$":
            return NOTHING
        if part[0] == "\\" and len(part) > 1:
            return self._escape(part)
        if part[0] == "[" and len(part) > 1:
            found = self._sets.get(part)
            if found is None:
                found = self._sets[part] = CharSet(char_set(part[1:-1]))
            return found
        return Literal(part)

    def _escape(self, part: str) -> Node:
        if part in ("\\b", "\\B", "\\A", "\\Z", "\\z"):
            return NOTHING
        return CharSet(_escaped(part))

    def _repeats(self, item: Node) -> Node:
        for _ in range(MAX_NESTING):
            if self._at >= len(self._tokens):
                return item
            part = self._tokens[self._at]
            bounds = _SIMPLE.get(part) or (bounds_of(part) if part[0] == "{" else None)
            if bounds is None:
                return item
            self._at += 1
            item = RepeatNode(item, *bounds)
            if self._at < len(self._tokens) and self._tokens[self._at] == "?":
                # Lazy or greedy makes no difference where every match counts.
                self._at += 1
        raise TooCostlyError(f"it repeats a part more than {MAX_NESTING} times over")


def bounds_of(part: str) -> tuple[int, int | None] | None:
    """Return the bounds of `{m}`, `{m,}`, `{,n}` or `{m,n}`; None for another text."""
    found = _BOUNDS.fullmatch(part)
    if found is None or not (found[1] or found[3]):
        return None
    least = _count(found[1])
    if not found[2]:
        return least, least
    return least, max(least, _count(found[3])) if found[3] else None


def char_set(inside: str) -> int:
    """Return the characters of a set, written between brackets."""
    inverted = inside.startswith("^")
    found = 0
    for first, last in _IN_SET.findall(inside[inverted:]):
        chars = _one(first)
        if not last:
            found |= chars
        elif (low := _letter(first)) and (high := _letter(last)):
            found |= char_range(low, high)
        else:
            found |= chars | char("-") | _one(last)
    # A set may contain some of the characters beyond ASCII, and its inverse the others.
    return (ALL & ~found) | (found & OTHER) if inverted else found


def _one(part: str) -> int:
    return _escaped(part) if part[0] == "\\" and len(part) > 1 else char(part)


def _escaped(part: str) -> int:
    kind = part[1]
    if kind in _CLASSES:
        return _CLASSES[kind]
    if kind == "p":
        return _CATEGORIES.get(part[3:4], ALL)
    letter = _letter(part)
    return char(letter) if letter else ALL


def _letter(part: str) -> str:
    """Return the character that `part` stands for, "" for several or an unknown one."""
    if part[0] != "\\" or len(part) == 1:
        return part
    kind = part[1]
    if kind in "xuU":
        digits = part[2:].strip("{}")
        return chr(int(digits, 16)) if digits and _is_code(digits) else ""
    if kind in _CONTROLS:
        return _CONTROLS[kind]
    return "" if kind.isalnum() else kind


def _is_code(digits: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in digits) and int(digits, 16) < 0x110000


def _count(digits: str) -> int:
    return min(_MAX_COUNT, int(digits)) if digits and len(digits) < 12 else _MAX_COUNT if digits else 0
