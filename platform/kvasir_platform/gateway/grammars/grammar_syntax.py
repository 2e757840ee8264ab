"""Reads grammars in EBNF or Lark's form, as far as their cost depends on it.

As in regex_syntax.py, nothing is refused for its syntax: the worker's own compiler validates the grammar.
What only one compiler knows, such as dispatch on tags, counts as any one character.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping

from kvasir_platform.gateway.grammars.nodes import (
    ALL,
    NOTHING,
    CharSet,
    ChoiceNode,
    Literal,
    Meter,
    Node,
    RepeatNode,
    RuleNode,
    SequenceNode,
    TooCostlyError,
    in_turn,
    one_of,
)
from kvasir_platform.gateway.grammars.regex_syntax import MAX_NESTING, bounds_of, char_set, parse_regex

_STRING = r'"(?:\\.|[^"\\])*"i?|' r"'(?:\\.|[^'\\])*'i?"
_NAME = r"[A-Za-z_][\w.\-]*"
_EBNF = re.compile(
    rf"(?P<skip>#[^\n]*|\s+)|(?P<rule>{_NAME})\s*::=|(?P<string>{_STRING})|(?P<set>\[(?:\\.|[^\]\\])*\])"
    rf"|(?P<call>{_NAME})\(|(?P<name>{_NAME})|(?P<bounds>\{{[\d,\s]*\}})|(?P<mark>.)",
    re.DOTALL,
)
_LARK = re.compile(
    rf"(?P<skip>//[^\n]*|#[^\n]*|\s+|%[^\n]*|->\s*\w+)"
    rf"|(?<![^\s])[?!]*(?P<rule>\w+)(?:\.-?\d+)?(?:\[[^\]]*\]|\{{[^}}]*\}})?\s*:|(?P<string>{_STRING})"
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/[a-z]*"
    r"|(?P<call>\w+)\{|(?P<name>[A-Za-z_]\w*)|(?P<bounds>~\s*\d+(?:\s*\.\.\s*\d+)?|\{[\d,\s]*\})|(?P<mark>.)",
    re.DOTALL,
)
_SIMPLE: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CLOSING = {"(": ")", "[": "]"}
_MAX_RULES = 1024
_ANY = CharSet(ALL)


def is_lark(text: str) -> bool:
    """Return whether vLLM reads `text` as Lark's form: no line defines a rule by `::=`."""
    return not any("::=" in re.sub(r"(#|//).*$", "", line) for line in text.split("\n"))


def parse_grammar(text: str, meter: Meter) -> Mapping[str, Node]:
    """Return the trees of the rules in `text`. Raise TooCostlyError if it is too large or nested too deep."""
    lark = is_lark(text)
    parser = _Parser(meter, "([" if lark else "(")
    for found in (_LARK if lark else _EBNF).finditer(text):
        kind = found.lastgroup or "mark"
        if kind != "skip":
            meter.count()
            parser.take(kind, found[kind])
    return parser.rules()


class _Parser:
    """Takes tokens one by one. Each open group has its options so far, and the items of the last of them."""

    def __init__(self, meter: Meter, openings: str) -> None:
        self._meter = meter
        self._openings = openings
        self._rules: dict[str, list[Node]] = {}
        self._name = ""
        self._groups: list[tuple[str, list[Node], list[Node]]] = [("", [], [])]
        self._skipped = 0
        self._takers: dict[str, Callable[[str], None]] = {
            "rule": self._rule,
            "string": lambda text: self._add(_literal(text)),
            "set": lambda text: self._add(CharSet(char_set(text[1:-1]))),
            "regex": lambda text: self._add(parse_regex(text, self._meter)),
            "call": self._call,
            "name": lambda text: self._add(RuleNode(text)),
            "bounds": self._bounds,
            "mark": self._mark,
        }

    def take(self, kind: str, text: str) -> None:
        """Take one token."""
        if self._skipped:
            self._skipped += {"call": 1, "(": 1, "{": 1, ")": -1, "}": -1}.get(
                "call" if kind == "call" else text, 0
            )
        else:
            self._takers[kind](text)

    def rules(self) -> Mapping[str, Node]:
        """Return the rules; a name that is defined twice has both definitions."""
        self._rule("")
        return {name: one_of(bodies) for name, bodies in self._rules.items()}

    def _rule(self, name: str) -> None:
        while len(self._groups) > 1:
            self._close()
        _, options, items = self._groups.pop()
        if self._name:
            self._rules.setdefault(self._name, []).append(one_of([*options, in_turn(items)]))
        if len(self._rules) > _MAX_RULES:
            raise TooCostlyError(f"it has more than {_MAX_RULES} rules")
        self._name = name
        self._groups.append(("", [], []))

    def _add(self, item: Node) -> None:
        self._groups[-1][2].append(item)

    def _call(self, name: str) -> None:
        self._skipped = 1
        self._add(_ANY)

    def _bounds(self, text: str) -> None:
        compact = "".join(text.split())
        if compact.startswith("~"):
            compact = "{" + compact[1:].replace("..", ",") + "}"
        self._repeat(bounds_of(compact))

    def _mark(self, text: str) -> None:
        if text in self._openings:
            if len(self._groups) > MAX_NESTING:
                raise TooCostlyError(f"its groups are nested more than {MAX_NESTING} deep")
            self._groups.append((text, [], []))
        elif text in ")]" and len(self._groups) > 1:
            self._close()
        elif text == "|":
            _, options, items = self._groups[-1]
            options.append(in_turn(items))
            items.clear()
        elif text in _SIMPLE:
            self._repeat(_SIMPLE[text])

    def _close(self) -> None:
        opening, options, items = self._groups.pop()
        self._add(one_of([*options, in_turn(items)]))
        if opening == "[":
            self._repeat((0, 1))

    def _repeat(self, bounds: tuple[int, int | None] | None) -> None:
        items = self._groups[-1][2]
        if bounds is None or not items:
            return
        item, depth = items[-1], 0
        while isinstance(item, RepeatNode):
            item, depth = item.item, depth + 1
        if depth > MAX_NESTING:
            raise TooCostlyError(f"it repeats a part more than {MAX_NESTING} times over")
        items[-1] = RepeatNode(items[-1], *bounds)


def _literal(text: str) -> Node:
    inside = text.rstrip("i")[1:-1]
    # Of an escape that JSON does not have, only the length is uncertain.
    with contextlib.suppress(ValueError):
        inside = str(json.loads(f'"{inside}"'))
    return Literal(inside) if inside else NOTHING


def names_in(node: Node) -> set[str]:
    """Return the rules that `node` refers to."""
    found: set[str] = set()
    nodes = [node]
    while nodes:
        match nodes.pop():
            case RuleNode(name):
                found.add(name)
            case SequenceNode(items):
                nodes += items
            case ChoiceNode(options):
                nodes += options
            case RepeatNode(item):
                nodes.append(item)
            case _:
                pass
    return found
