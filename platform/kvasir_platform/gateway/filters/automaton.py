"""Follows patterns through a stream, character by character, and knows where matches may have begun.

States that a match has come to are grouped by where it began, the earliest first, and a state that an earlier
one has come to is left out of later groups: it will go the same way. What groups become by a character is
computed once and kept, so that usual text costs one look-up per character, and text in which no match can
begin is searched at the speed of `re`. Time is linear in the text whatever the patterns are; a character that
was not met there before costs as much as there are states that matches have come to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from kvasir.config.checks.patterns import PatternAssertion, PatternGraph, PatternState

MAX_WEIGHT = 4_000_000
"""Of what is kept, in words of eight bytes, before all is forgotten and computed anew."""
_NODE_WEIGHT = 40
_GROUP_WEIGHT = 8
_STEP_WEIGHT = 25
_SHORT = 8
_SEARCHED = 24
"""In shorter text to step is faster than to search."""
_NONE = -1

_Groups = tuple[tuple[int, ...], ...]


class _Beside(IntEnum):
    """What stands on one side of a place in the text. EDGE is its start or its end."""

    EDGE = 0
    LINE_END = 1
    WORD = 2
    OTHER = 3


class _Node:
    """Groups of states after `beside` was read, and the steps from here that are known. `waits`: whether any
    of the states stands at a guard, or is whole but for one."""

    __slots__ = ("beside", "groups", "steps", "waits")

    def __init__(self, groups: _Groups, beside: _Beside, waits: bool) -> None:
        self.groups = groups
        self.beside = beside
        self.waits = waits
        self.steps: dict[str, _Step] = {}


class _Step(NamedTuple):
    """What one character does. Groups are counted as they are before it, and one that begins with it comes
    last. `before` and `after` are the first groups whose match ends right before and right after it, or
    `_NONE`. `kept`: which groups go on, None where all do and none begins."""

    node: _Node
    before: int
    after: int
    kept: tuple[int, ...] | None


class Automaton:
    """The patterns of one filter, for all of its texts. Used from one thread."""

    def __init__(self, graph: PatternGraph) -> None:
        self._graph = graph
        self._beside = graph.has_assertions
        self._nodes: dict[tuple[_Groups, _Beside], _Node] = {}
        self._idle: dict[_Beside, _Node] = {}
        self._fresh: dict[tuple[_Beside, _Beside, str], tuple[int, ...]] = {}
        numbers: dict[str, int] = {}
        self._tests = [
            _NONE if each.test is None else numbers.setdefault(each.test.pattern, len(numbers))
            for each in graph.states
        ]
        """Of each state the number of its test: many states share one."""
        self._onward = [self._short(each) for each in graph.states]
        self.weight = 0
        self.begins = re.compile("|".join(graph.first_char_tests()))

    def start(self) -> _Node:
        """Where a text begins."""
        return self._node((), _Beside.EDGE)

    def idle(self, last: str) -> _Node:
        """Where a text is after the character `last`, when no match can have begun."""
        kind = self._kind(last) if self._beside else _Beside.EDGE
        node = self._idle.get(kind)
        if node is None:
            node = self._idle[kind] = self._node((), kind)
        return node

    def step(self, node: _Node, letter: str) -> _Step:
        """What `letter` does, computed and kept."""
        if self.weight >= MAX_WEIGHT:
            # Texts hold on to the nodes they are at, and find their way back from there.
            for each in self._nodes.values():
                each.steps.clear()
            self._nodes.clear()
            self._idle.clear()
            self._fresh.clear()
            self.weight = 0
        step = node.steps[letter] = self._compute(node, letter)
        self.weight += _STEP_WEIGHT + (0 if step.kept is None else len(step.kept))
        return step

    def ending(self, node: _Node) -> int:
        """The first group whose match ends with the text, or `_NONE`."""
        return self._resolve(node.groups, node.beside, _Beside.EDGE)[1] if self._beside else _NONE

    def _compute(self, node: _Node, letter: str) -> _Step:
        kind = self._kind(letter)
        groups: Sequence[Sequence[int]] = node.groups
        before = _NONE
        if node.waits:
            groups, before = self._resolve(node.groups, node.beside, kind)
        accept = self._graph.accept
        seen: set[int] = set()
        passed: dict[int, bool] = {}
        made: list[tuple[int, ...]] = []
        kept: list[int] = []
        after = _NONE
        stepped = [self._stepped(group, letter, seen, passed) for group in groups]
        stepped.append([each for each in self._begun(node.beside, kind, letter) if each not in seen])
        for number, reached in enumerate(stepped):
            if accept in reached:
                reached.remove(accept)
                after = number
            if reached:
                made.append(tuple(sorted(reached)))
                kept.append(number)
        same = kept == list(range(len(node.groups)))
        return _Step(self._node(tuple(made), kind), before, after, None if same else tuple(kept))

    def _short(self, state: PatternState) -> tuple[int, ...] | None:
        """What follows `state` without a further character where that is easily told, as it nearly always
        is."""
        states, tests, accept = self._graph.states, self._tests, self._graph.accept
        reached: list[int] = []
        for each in state.onward:
            ends = tests[each] >= 0 or states[each].assertion is not None or each == accept
            further = (each,) if ends else states[each].onward
            if len(further) > _SHORT or not all(
                tests[far] >= 0 or states[far].assertion is not None or far == accept for far in further
            ):
                return None
            reached.extend(further)
        return tuple(reached)

    def _begun(self, left: _Beside, right: _Beside, letter: str) -> tuple[int, ...]:
        """The states of a match that begins with `letter`."""
        key = (left, right, letter)
        known = self._fresh.get(key)
        if known is None:
            ((group,), _) = self._resolve(((self._graph.start,),), left, right)
            known = self._fresh[key] = tuple(self._stepped(group, letter, set(), {}))
            self.weight += _STEP_WEIGHT + len(known)
        return known

    def _stepped(
        self, group: Sequence[int], letter: str, seen: set[int], passed: dict[int, bool]
    ) -> list[int]:
        """Where `letter` leads from `group`, but for what is in `seen`, to which it is added. `passed` has
        what `letter` was tested for."""
        tests, onward = self._tests, self._onward
        reached: list[int] = []
        for each in group:
            number = tests[each]
            passes = passed.get(number)
            if passes is None:
                test = self._graph.states[each].test
                passes = passed[number] = test is not None and test.match(letter) is not None
            if passes:
                closed = onward[each]
                if closed is None:
                    self._close(each, seen, reached)
                    continue
                for far in closed:
                    if far not in seen:
                        seen.add(far)
                        reached.append(far)
        return reached

    def _resolve(self, groups: _Groups, left: _Beside, right: _Beside) -> tuple[list[list[int]], int]:
        """The groups past all guards that hold between `left` and `right`, and the first of them whose match
        is whole by that."""
        states, accept = self._graph.states, self._graph.accept
        seen: set[int] = set()
        resolved: list[list[int]] = []
        whole = _NONE
        for number, group in enumerate(groups):
            reached: list[int] = []
            waiting = list(group)
            while waiting:
                each = waiting.pop()
                if each in seen:
                    continue
                seen.add(each)
                state = states[each]
                if state.test is not None:
                    reached.append(each)
                elif each == accept:
                    whole = number if whole == _NONE else whole
                elif state.assertion is None or _holds(state.assertion, left, right):
                    waiting.extend(state.onward)
            resolved.append(reached)
        return resolved, whole

    def _close(self, state: int, seen: set[int], reached: list[int]) -> None:
        """Add what follows `state` without a further character, as far as guards, to `reached`."""
        states, tests, accept = self._graph.states, self._tests, self._graph.accept
        waiting = list(states[state].onward)
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            if tests[each] >= 0 or states[each].assertion is not None or each == accept:
                reached.append(each)
            else:
                waiting.extend(states[each].onward)

    def _node(self, groups: _Groups, beside: _Beside) -> _Node:
        key = (groups, beside)
        node = self._nodes.get(key)
        if node is None:
            waits = self._beside and any(self._tests[each] < 0 for group in groups for each in group)
            node = self._nodes[key] = _Node(groups, beside, waits)
            self.weight += _NODE_WEIGHT + sum(map(len, groups)) + _GROUP_WEIGHT * len(groups)
        return node

    def _kind(self, letter: str) -> _Beside:
        if not self._beside:
            return _Beside.EDGE
        if letter == "\n":
            return _Beside.LINE_END
        return _Beside.WORD if letter.isalnum() or letter == "_" else _Beside.OTHER


def _holds(assertion: PatternAssertion, left: _Beside, right: _Beside) -> bool:
    match assertion:
        case PatternAssertion.TEXT_START:
            return left is _Beside.EDGE
        case PatternAssertion.TEXT_END:
            return right is _Beside.EDGE
        case PatternAssertion.LINE_START:
            return left in (_Beside.EDGE, _Beside.LINE_END)
        case PatternAssertion.LINE_END:
            return right in (_Beside.EDGE, _Beside.LINE_END)
        case PatternAssertion.WORD_BOUNDARY:
            return (left is _Beside.WORD) is not (right is _Beside.WORD)
        case PatternAssertion.NOT_WORD_BOUNDARY:
            return (left is _Beside.WORD) is (right is _Beside.WORD)


class Scan:
    """One text on its way through an automaton. `starts` are where matches that may still become whole have
    begun, in order; positions count characters from the text's beginning."""

    __slots__ = ("_automaton", "_node", "position", "starts")

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._node = automaton.start()
        self.position = 0
        self.starts: list[int] = []

    def feed(
        self, text: str, *, only_first: bool = False, longest: int | None = None
    ) -> list[tuple[int, int]]:
        """Go on by `text`. Returns where matches begin and end, by their ends; of those that end at the same
        place the longest. Stops with `only_first` at the first, and once one that may be coming is longer
        than `longest`: what is left of the text is not looked at then."""
        automaton, node, first, starts = self._automaton, self._node, self.position, self.starts
        found: list[tuple[int, int]] = []
        at, size = 0, len(text)
        while at < size:
            if size - at > _SEARCHED and not starts:
                begins = automaton.begins.search(text, at)
                begun = size - 1 if begins is None else begins.start()
                if begun > at:
                    node = automaton.idle(text[begun - 1])
                    at = begun
            letter = text[at]
            step = node.steps.get(letter)
            if step is None:
                step = automaton.step(node, letter)
            node, before, after, kept = step
            if before >= 0:
                found.append((starts[before], first + at))
            if after >= 0:
                found.append((starts[after] if after < len(starts) else first + at, first + at + 1))
            if kept is not None:
                starts = [starts[k] if k < len(starts) else first + at for k in kept]
            at += 1
            if only_first and found:
                break
            if longest is not None and starts and first + at - starts[0] > longest:
                break
        self._node, self.position, self.starts = node, first + at, starts
        return found

    def enter(self, last: str) -> None:
        """Begin in the midst of a text, after the character `last`."""
        self._node = self._automaton.idle(last)

    def finish(self) -> list[tuple[int, int]]:
        """The match that the end of the text makes whole, if there is one."""
        ending = self._automaton.ending(self._node)
        return [] if ending < 0 else [(self.starts[ending], self.position)]
