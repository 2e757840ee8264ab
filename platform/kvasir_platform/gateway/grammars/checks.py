"""Judges the patterns, schemas, grammars and structural tags of one request.

A worker computes which tokens may follow, for each token of output and between two steps of all its streams.
So what is costly to match is refused before a worker has it, from its text alone; the worker ends a request
whose grammar takes too long in spite of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir_platform.gateway.grammars.grammar_syntax import parse_grammar
from kvasir_platform.gateway.grammars.nodes import (
    ALL,
    NOTHING,
    CharSet,
    Literal,
    Meter,
    Node,
    RepeatNode,
    in_turn,
    one_of,
)
from kvasir_platform.gateway.grammars.regex_syntax import MAX_NESTING, parse_regex
from kvasir_platform.gateway.grammars.rules import judge_rules
from kvasir_platform.gateway.grammars.shapes import NO_TEXT, shape_of

MAX_PARTS = 1 << 12
"""Maximum number of parts of all patterns and grammars of one request, counted each time they are read."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
_ANY_TEXT = RepeatNode(CharSet(ALL), 0, None)
_REPEATS: dict[str, tuple[int, int | None]] = {"star": (0, None), "plus": (1, None), "optional": (0, 1)}


def new_meter() -> Meter:
    """Return the meter of one request."""
    return Meter(MAX_PARTS)


def judge_regex(pattern: str, meter: Meter) -> None:
    """Raise TooCostlyError for a regular expression that can be matched in too many ways."""
    _judge(parse_regex(pattern, meter), meter)


def judge_grammar(text: str, meter: Meter) -> None:
    """Raise TooCostlyError for a grammar that can be matched in too many ways."""
    judge_rules(parse_grammar(text, meter), meter)


def judge_schema(schema: object, meter: Meter) -> None:
    """Judge the patterns in a JSON schema, whose depth has been checked. Raise TooCostlyError."""
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += [each for each in node if isinstance(each, dict | list)]
            continue
        if not isinstance(node, Mapping):
            continue
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            judge_regex(pattern, meter)
        for key in _mapping(node.get("patternProperties")):
            judge_regex(key, meter)
        nodes += [
            value for key, value in node.items() if key not in _VALUES and isinstance(value, dict | list)
        ]


def judge_tag(tag: object, meter: Meter) -> None:
    """Judge a structural tag, whose depth has been checked: its patterns, grammars and schemas, and how its
    formats repeat each other. Raise TooCostlyError."""
    judge_schema(tag, meter)
    _judge(_format(_mapping(tag).get("format"), meter, 0), meter)


def _judge(node: Node, meter: Meter) -> None:
    shape_of(node, lambda _: NO_TEXT, meter)


def _format(value: object, meter: Meter, depth: int) -> Node:
    """Return the tree of one format of a structural tag (xgrammar's structural_tag.py)."""
    meter.count()
    part = _mapping(value)
    kind = part.get("type")
    if depth > MAX_NESTING or not isinstance(kind, str):
        return NOTHING
    content = part.get("content")
    if kind in _REPEATS:
        return RepeatNode(_format(content, meter, depth + 1), *_REPEATS[kind])
    if kind == "repeat":
        least, most = _int(part.get("min"), 0), _int(part.get("max"), -1)
        return RepeatNode(_format(content, meter, depth + 1), least, None if most < 0 else most)
    if kind in ("sequence", "or"):
        elements = part.get("elements")
        found = [_format(each, meter, depth + 1) for each in elements] if isinstance(elements, list) else []
        return NOTHING if not found else in_turn(found) if kind == "sequence" else one_of(found)
    return _leaf(kind, part, meter, depth)


def _leaf(kind: str, part: Mapping[str, Any], meter: Meter, depth: int) -> Node:
    if kind == "tag":
        ends = part.get("end")
        end = ends[0] if isinstance(ends, list) and ends else ends
        content = _format(part.get("content"), meter, depth + 1)
        return in_turn([_text(part.get("begin")), content, _text(end)])
    if kind == "const_string":
        return _text(part.get("value"))
    if kind == "regex" and isinstance(pattern := part.get("pattern"), str):
        return parse_regex(pattern, meter)
    if kind == "grammar" and isinstance(grammar := part.get("grammar"), str):
        judge_grammar(grammar, meter)
    if kind in ("any_text", "any_tokens"):
        return _ANY_TEXT
    for each in part.get("tags") or () if isinstance(part.get("tags"), list) else ():
        _judge(_format(each, meter, depth + 1), meter)
    return CharSet(ALL)


def _text(value: object) -> Node:
    return Literal(value) if isinstance(value, str) and value else NOTHING


def _int(value: object, default: int) -> int:
    return min(value, 1 << 20) if isinstance(value, int) else default


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
