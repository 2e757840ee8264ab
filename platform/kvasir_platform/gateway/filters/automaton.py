"""Follows patterns through a stream, character by character, and knows where matches may have begun.

States that a match has come to are grouped by where it began, the earliest first, and a state that an earlier
one has come to is left out of later groups: it will go the same way. What groups become by a character is
computed once and kept, so that usual text costs one look-up per character, and text in which no match can
begin is searched at the speed of `re`. Time is linear in the text whatever the patterns are.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from kvasir.config.patterns import Guard, PatternGraph

_MAX_STEPS = 50_000
"""What is kept before all is forgotten and computed anew: tens of megabytes at most."""
_NONE = -1

_Groups = tuple[tuple[int, ...], ...]


class _Beside(IntEnum):
    """What stands on one side of a place in the text. EDGE is its start or its end."""

    EDGE = 0
    LINE_END = 1
    WORD = 2
    OTHER = 3


class _Node:
    """Groups of states after `beside` was read, and the steps from here that are known."""

    __slots__ = ("beside", "groups", "steps")

    def __init__(self, groups: _Groups, beside: _Beside) -> None:
        self.groups = groups
        self.beside = beside
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
        self._beside = graph.guarded
        self._nodes: dict[tuple[_Groups, _Beside], _Node] = {}
        self._fresh: dict[tuple[_Beside, _Beside, str], tuple[int, ...]] = {}
        self._steps = 0
        self.begins = re.compile("|".join(graph.beginnings()))

    def start(self) -> _Node:
        """Where a text begins."""
        return self._node((), _Beside.EDGE)

    def idle(self, last: str) -> _Node:
        """Where a text is after the character `last`, when no match can have begun."""
        return self._node((), self._kind(last))

    def step(self, node: _Node, letter: str) -> _Step:
        """What `letter` does, computed and kept."""
        if self._steps >= _MAX_STEPS:
            # Texts hold on to the nodes they are at, and find their way back from there.
            for each in self._nodes.values():
                each.steps.clear()
            self._nodes.clear()
            self._fresh.clear()
            self._steps = 0
        self._steps += 1
        step = node.steps[letter] = self._compute(node, letter)
        return step

    def ending(self, node: _Node) -> int:
        """The first group whose match ends with the text, or `_NONE`."""
        return self._resolve(node.groups, node.beside, _Beside.EDGE)[1] if self._beside else _NONE

    def _compute(self, node: _Node, letter: str) -> _Step:
        kind = self._kind(letter)
        groups, before = self._resolve(node.groups, node.beside, kind)
        accept = self._graph.accept
        seen: set[int] = set()
        made: list[tuple[int, ...]] = []
        kept: list[int] = []
        after = _NONE
        stepped = [self._stepped(group, letter, seen) for group in groups]
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

    def _begun(self, left: _Beside, right: _Beside, letter: str) -> tuple[int, ...]:
        """The states of a match that begins with `letter`."""
        key = (left, right, letter)
        known = self._fresh.get(key)
        if known is None:
            ((group,), _) = self._resolve(((self._graph.start,),), left, right)
            known = self._fresh[key] = tuple(self._stepped(group, letter, set()))
        return known

    def _stepped(self, group: list[int], letter: str, seen: set[int]) -> list[int]:
        """Where `letter` leads from `group`, but for what is in `seen`, to which it is added."""
        states = self._graph.states
        reached: list[int] = []
        for each in group:
            test = states[each].test
            if test is not None and test.match(letter):
                self._close(states[each].onward, seen, reached)
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
                elif state.guard is None or _holds(state.guard, left, right):
                    waiting.extend(state.onward)
            resolved.append(reached)
        return resolved, whole

    def _close(self, onward: tuple[int, ...], seen: set[int], reached: list[int]) -> None:
        """Add what follows without a character, as far as guards, to `reached`."""
        states = self._graph.states
        waiting = list(onward)
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            state = states[each]
            if state.test is not None or state.guard is not None or each == self._graph.accept:
                reached.append(each)
            else:
                waiting.extend(state.onward)

    def _node(self, groups: _Groups, beside: _Beside) -> _Node:
        key = (groups, beside)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(groups, beside)
        return node

    def _kind(self, letter: str) -> _Beside:
        if not self._beside:
            return _Beside.EDGE
        if letter == "\n":
            return _Beside.LINE_END
        return _Beside.WORD if letter.isalnum() or letter == "_" else _Beside.OTHER


def _holds(guard: Guard, left: _Beside, right: _Beside) -> bool:
    match guard:
        case Guard.TEXT_START:
            return left is _Beside.EDGE
        case Guard.TEXT_END:
            return right is _Beside.EDGE
        case Guard.LINE_START:
            return left in (_Beside.EDGE, _Beside.LINE_END)
        case Guard.LINE_END:
            return right in (_Beside.EDGE, _Beside.LINE_END)
        case Guard.WORD_EDGE:
            return (left is _Beside.WORD) is not (right is _Beside.WORD)
        case Guard.NO_WORD_EDGE:
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
        automaton, node, position, starts = self._automaton, self._node, self.position, self.starts
        found: list[tuple[int, int]] = []
        search = automaton.begins.search
        first = position
        end = position + len(text)
        while position < end:
            if not starts:
                begins = search(text, position - first)
                skipped = (end if begins is None else begins.start() + first) - position
                if skipped:
                    position += skipped
                    node = automaton.idle(text[position - first - 1])
                    if begins is None:
                        break
            letter = text[position - first]
            step = node.steps.get(letter) or automaton.step(node, letter)
            if step.before >= 0:
                found.append((starts[step.before], position))
            if step.after >= 0:
                begun = starts[step.after] if step.after < len(starts) else position
                found.append((begun, position + 1))
            if step.kept is not None:
                starts = [starts[k] if k < len(starts) else position for k in step.kept]
            node = step.node
            position += 1
            if (only_first and found) or (longest is not None and starts and position - starts[0] > longest):
                break
        self._node, self.position, self.starts = node, position, starts
        return found

    def finish(self) -> list[tuple[int, int]]:
        """The match that the end of the text makes whole, if there is one."""
        ending = self._automaton.ending(self._node)
        return [] if ending < 0 else [(self.starts[ending], self.position)]
