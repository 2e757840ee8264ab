"""The shapes of a grammar's rules, which may refer to each other and to themselves.

Rules are judged after those that they refer to. Rules that refer to each other in a circle are judged
together: what can begin and continue them is computed until it changes no more, and inside of them each
counts as a repeat without end. A rule that is only two of itself is refused: a text of n parts has
exponentially many such readings, and a parser needs time with each part for all parts before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvasir_platform.gateway.grammars.grammar_syntax import names_in
from kvasir_platform.gateway.grammars.nodes import (
    ALL,
    ChoiceNode,
    Meter,
    Node,
    RepeatNode,
    RuleNode,
    SequenceNode,
    TooCostlyError,
)
from kvasir_platform.gateway.grammars.shapes import ENDLESS, MANY, NO_TEXT, Shape, shape_of

_UNKNOWN = Shape(
    empty=False, first=ALL, alive=0, states=1, spread=1, ways=1, shortest=1, longest=MANY, ends=1
)
"""A rule that is not defined, such as a token of Lark's library."""


def judge_rules(rules: Mapping[str, Node], meter: Meter) -> None:
    """Raise TooCostlyError for a grammar that can be matched in too many ways."""
    shapes: dict[str, Shape] = {}
    for circle in _circles({name: names_in(node) & rules.keys() for name, node in rules.items()}):
        if len(circle) == 1 and circle[0] not in names_in(rules[circle[0]]):
            shapes[circle[0]] = shape_of(rules[circle[0]], lambda name: shapes.get(name, _UNKNOWN), meter)
        else:
            _judge_circle(circle, rules, shapes, meter)


def _judge_circle(
    circle: Sequence[str], rules: Mapping[str, Node], shapes: dict[str, Shape], meter: Meter
) -> None:
    begun = Shape(empty=False, states=1, spread=ENDLESS, ways=1, shortest=0, longest=MANY, ends=MANY)
    shapes.update(dict.fromkeys(circle, begun))
    changed = True
    while changed:
        changed = False
        for name in circle:
            old = shapes[name]
            new = shape_of(rules[name], lambda each: shapes.get(each, _UNKNOWN), meter)
            kept = begun._replace(empty=new.empty, first=new.first, alive=new.alive, counted=new.counted)
            if kept != old:
                shapes[name], changed = kept, True
    for name in circle:
        for option in _options(rules[name]):
            if _is_twice_itself(option, frozenset(circle), shapes):
                raise TooCostlyError(
                    f"its rule {name[:64]!r} is two of itself in a row: write it as a repeat"
                )


def _options(node: Node) -> Sequence[Node]:
    return node.options if isinstance(node, ChoiceNode) else (node,)


def _is_twice_itself(option: Node, circle: frozenset[str], shapes: Mapping[str, Shape]) -> bool:
    """Whether `option` begins and ends with rules of its own circle, and has nothing else between them that
    must be there."""
    found = 0
    for item in option.items if isinstance(option, SequenceNode) else (option,):
        inner = item.item if isinstance(item, RepeatNode) else item
        if isinstance(inner, RuleNode) and inner.name in circle:
            found += 2 if isinstance(item, RepeatNode) and item.most != 1 else 1
        elif not _may_be_empty(item, shapes):
            return False
    return found > 1


def _may_be_empty(node: Node, shapes: Mapping[str, Shape]) -> bool:
    match node:
        case RuleNode(name):
            return shapes.get(name, NO_TEXT).empty if name in shapes else False
        case SequenceNode(items):
            return all(_may_be_empty(item, shapes) for item in items)
        case ChoiceNode(options):
            return any(_may_be_empty(option, shapes) for option in options)
        case RepeatNode(item, least):
            return least == 0 or _may_be_empty(item, shapes)
        case _:
            return False


def _circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, each after those that it refers to (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in edges:
        if root in order:
            continue
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(sorted(edges[root])))]
        while work:
            name, following = work[-1]
            for other in following:
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(sorted(edges[other]))))
                    break
                if other in on_stack:
                    low[name] = min(low[name], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == order[name]:
                    at = stack.index(name)
                    found.append(stack[at:][::-1])
                    on_stack.difference_update(stack[at:])
                    del stack[at:]
    return found
