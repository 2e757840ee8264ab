"""How many ways of matching a tree are open at the same time, which is what each token of output costs.

A compiled grammar is matched by an Earley parser: every way in which the output so far can be read is
followed at once, for every token of the vocabulary. Where each character can be read in one way only, a
repeat costs nothing, however large. Where a repeated part can also be read as two of its repetitions, the
ways multiply: with the counts of nested repeats, and with the length of the output.

Such a place is found as in deterministic content models (Brüggemann-Klein and Wood, One-Unambiguous Regular
Languages, 1998): the characters that can continue a part and those that can begin the next one overlap. The
judgement is an estimate on sets of characters: it may miss ambiguity that takes several characters to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvasir_platform.gateway.grammars.nodes import (
    CharSet,
    ChoiceNode,
    Literal,
    Meter,
    Node,
    RepeatNode,
    RuleNode,
    SequenceNode,
    TooCostlyError,
    char,
)

MAX_WAYS = 56
"""Maximum number of ways that may be open at the same time."""
MAX_COUNTED = 4096
"""Maximum number of states of nested counted repeats: the product of their counts."""
ENDLESS = 12
"""What a repeat without end counts inside of an ambiguous repeat."""
MANY = 1 << 30
_MAX_COMPARED = 16


class Shape(NamedTuple):
    """What is known of a tree.

    `empty`: it matches the empty text. `first`: the characters that can begin it. `alive`: those that can
    continue it when it could also end. `states`: places in it, repeats counted; `spread`: the same where
    repeats are ambiguous; `ways`: how many can be open at once; `shortest` and `longest`: its lengths;
    `ends`: at how many of them it can end while it goes on. `counted`: it has a counted repeat.
    """

    empty: bool = True
    first: int = 0
    alive: int = 0
    states: int = 0
    spread: int = 0
    ways: int = 0
    shortest: int = 0
    longest: int = 0
    ends: int = 1
    counted: bool = False


NO_TEXT = Shape()
RuleShape = Callable[[str], Shape]


def shape_of(node: Node, rule: RuleShape, meter: Meter) -> Shape:
    """Return the shape of `node`; `rule` has those of rules. Raise TooCostlyError for a tree that can be
    matched in too many ways."""
    meter.count()
    match node:
        case CharSet(chars):
            return _text(chars, 1)
        case Literal(text):
            return _text(char(text[0]), len(text))
        case SequenceNode(items):
            return _in_turn(shape_of(item, rule, meter) for item in items)
        case ChoiceNode(options):
            return _one_of(options, [shape_of(option, rule, meter) for option in options], rule, meter)
        case RepeatNode(item, least, most):
            return _repeated(shape_of(item, rule, meter), least, most)
        case RuleNode(name):
            return rule(name)


def _text(first: int, length: int) -> Shape:
    return Shape(
        empty=False, first=first, states=1, spread=1, ways=1, shortest=length, longest=length, ends=1
    )


def _in_turn(parts: Iterable[Shape]) -> Shape:
    whole = NO_TEXT
    for part in parts:
        whole = _followed(whole, part)
    return whole


def _followed(before: Shape, after: Shape) -> Shape:
    open_on = bool(before.alive & after.first)
    ways = max(before.ways, after.ways)
    if open_on:
        ways = before.ways + min(after.states, before.ends * after.ways)
        _check_ways(ways)
    kept = open_on or after.empty
    return Shape(
        empty=before.empty and after.empty,
        first=before.first | (after.first if before.empty else 0),
        alive=after.alive | (before.alive if kept else 0),
        states=min(MANY, before.states + after.states),
        spread=min(MANY, before.spread + after.spread),
        ways=ways,
        shortest=before.shortest + after.shortest,
        longest=min(MANY, before.longest + after.longest),
        ends=min(MANY, before.ends + after.ends) if kept else after.ends,
        counted=before.counted or after.counted,
    )


def _one_of(options: Sequence[Node], shapes: Sequence[Shape], rule: RuleShape, meter: Meter) -> Shape:
    first = alive = states = spread = ways = longest = 0
    for shape in shapes:
        first |= shape.first
        alive |= shape.alive
        states += shape.states
        spread += shape.spread
        ways = max(ways, shape.ways)
        longest = max(longest, shape.longest)
    empty = any(shape.empty for shape in shapes)
    shortest = min(shape.shortest for shape in shapes)
    return Shape(
        empty=empty,
        first=first,
        alive=alive | (first if empty else 0) | _beyond_prefixes(options, rule, meter),
        states=min(MANY, states),
        spread=min(MANY, spread),
        ways=ways,
        shortest=shortest,
        longest=longest,
        ends=longest - shortest + 1,
        counted=any(shape.counted for shape in shapes),
    )


def _beyond_prefixes(options: Sequence[Node], rule: RuleShape, meter: Meter) -> int:
    """Return the characters that continue an option where another one ends."""
    found = 0
    texts = sorted(option.text for option in options if isinstance(option, Literal))
    for shorter, longer in pairwise(texts):
        if len(shorter) < len(longer) and longer.startswith(shorter):
            found |= char(longer[len(shorter)])
    if len(options) > _MAX_COMPARED:
        return found
    parts = [option.items if isinstance(option, SequenceNode) else (option,) for option in options]
    for shorter_parts in parts:
        for longer_parts in parts:
            at = len(shorter_parts)
            meter.count()
            if 0 < at < len(longer_parts) and longer_parts[:at] == shorter_parts:
                found |= shape_of(longer_parts[at], rule, meter).first
    return found


def _repeated(item: Shape, least: int, most: int | None) -> Shape:
    if most == 0:
        return NO_TEXT
    empty = least == 0 or item.empty
    if most == 1:
        shortest = 0 if empty else item.shortest
        return item._replace(
            empty=empty,
            alive=item.alive | (item.first if empty else 0),
            shortest=shortest,
            ends=item.longest - shortest + 1,
        )
    ambiguous = bool(item.alive & item.first)
    counted = most is not None or least > 1
    states = min(MANY, item.states * (most if most is not None else max(1, least)))
    spread = min(MANY, item.spread * max(least, ENDLESS if most is None else most))
    if counted and item.counted and states > MAX_COUNTED:
        raise TooCostlyError(
            f"its nested counted repeats make {states} states, the product of their counts; "
            f"{MAX_COUNTED} are allowed"
        )
    if ambiguous:
        _check_ways(spread)
    exact = least == most and not ambiguous
    shortest = item.shortest * least
    longest = MANY if most is None else min(MANY, item.longest * most)
    return Shape(
        empty=empty,
        first=item.first,
        alive=item.alive if exact else item.alive | item.first,
        states=states,
        spread=spread,
        ways=spread if ambiguous else item.ways,
        shortest=shortest,
        longest=longest,
        ends=item.ends if exact else longest - shortest + 1,
        counted=counted or item.counted,
    )


def _check_ways(ways: int) -> None:
    if ways > MAX_WAYS:
        raise TooCostlyError(
            f"a text can match it in {ways} ways at the same time; {MAX_WAYS} are allowed: separate what is "
            "repeated by a delimiter, and do not repeat what may be empty"
        )
