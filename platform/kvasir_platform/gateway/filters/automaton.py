"""Matches patterns in a stream character by character, and tracks where unfinished matches begin.

The states of unfinished matches are grouped by the position where the match begins, earliest first; a state
in an earlier group is dropped from later ones, since both would proceed identically. The transition of the
groups by a character is computed once and cached, so usual text costs one lookup per character, and text in
which no match can begin is searched at the speed of `re`. Time is linear in the text for any patterns; a
transition that is not cached costs time proportional to the number of active states.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from kvasir.config.checks.patterns import PatternAssertion, PatternGraph, PatternState

MAX_WEIGHT = 4_000_000
"""Limit of the cache, in 8-byte words; beyond it the cache is cleared."""
_NODE_WEIGHT = 40
_GROUP_WEIGHT = 8
_STEP_WEIGHT = 25
_SHORT = 8
_SEARCHED = 24
"""Shorter text is faster to step through than to search."""
_NONE = -1

_Groups = tuple[tuple[int, ...], ...]


class _Beside(IntEnum):
    """The kind of character on one side of a position. EDGE is the start or the end of the text."""

    EDGE = 0
    LINE_END = 1
    WORD = 2
    OTHER = 3


class _Node:
    """Groups of states after a character of kind `beside`, with the cached transitions. `waits`: whether any
    of the states is at an assertion, or accepts if an assertion holds."""

    __slots__ = ("beside", "groups", "steps", "waits")

    def __init__(self, groups: _Groups, beside: _Beside, waits: bool) -> None:
        self.groups = groups
        self.beside = beside
        self.waits = waits
        self.steps: dict[str, _Step] = {}


class _Step(NamedTuple):
    """The transition by one character. Groups are numbered as before it; a group that begins with it is last.
    `before` and `after` are the first groups whose match ends just before and just after it, or `_NONE`.
    `kept` lists the groups that remain, None if all do and none begins."""

    node: _Node
    before: int
    after: int
    kept: tuple[int, ...] | None


class Automaton:
    """The compiled patterns of one filter, shared by all of its texts. Not thread-safe."""

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
        """The test number of each state; many states share a test."""
        self._onward = [self._short(each) for each in graph.states]
        self.weight = 0
        self.begins = re.compile("|".join(graph.first_char_tests()))

    def start(self) -> _Node:
        """Return the node at the start of a text."""
        return self._node((), _Beside.EDGE)

    def idle(self, last: str) -> _Node:
        """Return the node after the character `last` while no match is unfinished."""
        kind = self._kind(last) if self._beside else _Beside.EDGE
        node = self._idle.get(kind)
        if node is None:
            node = self._idle[kind] = self._node((), kind)
        return node

    def step(self, node: _Node, letter: str) -> _Step:
        """Compute and cache the transition from `node` by `letter`."""
        if self.weight >= MAX_WEIGHT:
            # Scans keep references to their nodes and can continue from them.
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
        """Return the first group whose match ends with the text, or `_NONE`."""
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
        """Return the states that follow `state` without a further character if at most one level has to be
        expanded, as is usual; else None."""
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
        """Return the states of a match that begins with `letter`."""
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
        """Return the states reached from `group` by `letter`, without those in `seen`, and add them to
        `seen`. `passed` caches the test results for `letter`."""
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
        """Return the groups after all assertions that hold between `left` and `right`, and the first group
        whose match completes by that."""
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
        """Add the states that follow `state` without a further character, up to assertions, to `reached`."""
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
    """The scan of one text by an automaton. `starts` are the positions where unfinished matches begin, in
    order; positions count characters from the beginning of the text."""

    __slots__ = ("_automaton", "_node", "position", "starts")

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._node = automaton.start()
        self.position = 0
        self.starts: list[int] = []

    def feed(
        self, text: str, *, only_first: bool = False, longest: int | None = None
    ) -> list[tuple[int, int]]:
        """Scan `text`. Return begin and end of each match, ordered by end; of those with the same end the
        longest. With `only_first`, stop at the first match; stop also when an unfinished match is longer than
        `longest`. The rest of the text is then not scanned."""
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
        """Begin within a text, after the character `last`."""
        self._node = self._automaton.idle(last)

    def finish(self) -> list[tuple[int, int]]:
        """Return the match that completes at the end of the text, if any."""
        ending = self._automaton.ending(self._node)
        return [] if ending < 0 else [(self.starts[ending], self.position)]
