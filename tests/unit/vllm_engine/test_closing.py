"""Constrained output that is completed before its limit, without an engine: grammars are regular expressions,
and the model writes whatever the mask allows, at random."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvasir.config.checks.patterns import PatternGraph, build_graph
from kvasir_workers.engines.vllm.output.closing import (
    FRUITLESS_S,
    SEARCH_S,
    WINDOW,
    ClosingGrammar,
    ClosingVocabulary,
    allows,
)
from kvasir_workers.engines.vllm.output.grammar_budget import STEP_S

TOKENS = ("<end>", *'abcxyz0159"{}[]:,.-@ </parmt>eg_vlu', "name", '","', '":"', '"}', "},{", "abc")
END = 0
TEXT = r'"[^"]*"'
FLAT = rf'\{{"name":{TEXT},"xyz":{TEXT}\}}'
LIST = rf'\{{"name":\[({FLAT}(,{FLAT})*)?\]\}}'
NUMBER = r'\{"a":-?[0-9]+(\.[0-9]+)?\}'
XML = "(<parameter>[^<]*</parameter>|<arg_value>[^<]*</arg_value>)zz"
CALLS = rf"(abc{FLAT}zzz)+"


class Vocabulary:
    """A tokenizer's, whose tokens are their own text."""

    def __init__(self, tokens: Sequence[str] = TOKENS) -> None:
        self._tokens = tokens

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self._tokens.index(text) if text in self._tokens else None

    def convert_ids_to_tokens(self, token: int) -> str:
        return self._tokens[token]


class PatternGrammar:
    """What matches a pattern, with the methods of vLLM's grammars."""

    def __init__(self, pattern: str) -> None:
        self._graph = build_graph([pattern])
        self._places = [reached(self._graph, {self._graph.start})]
        self.ended = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            self.ended = token == END
            self._places.append(self._places[-1] if self.ended else self._after(token))
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        valid = 0
        for token in tokens:
            if not (self._ends() if token == END else self._after(token)):
                break
            self._places.append(self._places[-1] if token == END else self._after(token))
            valid += 1
        self.rollback(valid)
        return tokens[:valid]

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        bitmask[index] = 0
        for token in range(len(TOKENS)):
            if self._ends() if token == END else self._after(token):
                bitmask[index][token >> 5] |= np.int32(1 << (token & 31) if token & 31 < 31 else -(1 << 31))

    def rollback(self, count: int) -> None:
        del self._places[len(self._places) - count :]

    def _ends(self) -> bool:
        return self._graph.accept in self._places[-1]

    def _after(self, token: int) -> frozenset[int]:
        places = self._places[-1]
        for char in TOKENS[token]:
            onward: set[int] = set()
            for place in places:
                state = self._graph.states[place]
                if state.test is not None and state.test.match(char):
                    onward.update(state.onward)
            places = reached(self._graph, onward)
        return places


def reached(graph: PatternGraph, places: set[int]) -> frozenset[int]:
    found, waiting = set[int](), list(places)
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            if graph.states[place].test is None:
                waiting.extend(graph.states[place].onward)
    return frozenset(found)


class Run:
    """One output of a model that chooses at random, within `limit` tokens, `there` of them from before."""

    def __init__(self, pattern: str, limit: int, *, there: Sequence[int] = (), clock: Any = None) -> None:
        self.output = list(there)
        self.shortened = False
        self.inner = PatternGrammar(pattern)
        self.grammar = ClosingGrammar(
            self.inner,
            ClosingVocabulary(Vocabulary()),
            limit=limit - len(there),
            produced=lambda: len(self.output) - len(there),
            stops=[END],
            allocate=mask,
            cpu_s=clock or (lambda: 0.0),
            shortened=self._note,
        )
        self._limit = limit
        self.grammar.accept_tokens("r", list(there))

    def allowed(self) -> list[int]:
        row = mask()
        self.grammar.fill_bitmask(row, 0)
        return [token for token in range(len(TOKENS)) if allows(row[0].view(np.uint32), token)]

    def write(self, rng: random.Random, *, ends: bool = False) -> str:
        """Return the text; unless it `ends` by itself, the model avoids what closes or ends it."""
        while len(self.output) < self._limit:
            allowed = self.allowed()
            wordy = [token for token in allowed if token and not set(TOKENS[token]) & set('"}]<')]
            self.take(rng.choice(allowed if ends else wordy or allowed))
            if self.output[-1] == END:
                break
        return self.text()

    def take(self, token: int) -> None:
        assert self.grammar.accept_tokens("r", [token])
        self.output.append(token)

    def text(self) -> str:
        return "".join(TOKENS[token] for token in self.output if token != END)

    def _note(self) -> None:
        self.shortened = True


def mask() -> Any:
    return np.zeros((1, 2), np.int32)


@pytest.mark.parametrize("limit", [90, 200])
@pytest.mark.parametrize(
    "pattern", [FLAT, LIST, NUMBER, CALLS, XML], ids=["strings", "list", "number", "calls", "xml"]
)
def test_an_output_is_complete_at_its_limit(pattern: str, limit: int) -> None:
    for seed in range(2):
        run = Run(pattern, limit)
        text = run.write(random.Random(seed))
        assert re.fullmatch(pattern, text), text
        assert run.output[-1] == END
        assert run.shortened
        assert len(run.output) > limit // 2, "most of the limit is the model's"


@pytest.mark.parametrize(("left", "ends"), [(60, False), (22, True)])
def test_nothing_is_begun_that_would_not_fit(left: int, ends: bool) -> None:
    run = Run(CALLS, 100)
    start, rest = ["abc", "{", '"', "name", '":"'], ['","', "x", "y", "z", '":"', '"}', "z", "z", "z"]
    filling = ["a"] * (100 - left - len(start) - len(rest))
    for text in (*start, *filling, *rest):
        run.take(TOKENS.index(text))
    assert (run.allowed() == [END]) is ends


def test_an_output_that_ends_in_time_is_the_models_own() -> None:
    for seed in range(8):
        run, plain = Run(FLAT, 300), PatternGrammar(FLAT)
        run.write(random.Random(seed), ends=True)
        assert run.output[-1] == END
        assert not run.shortened
        assert plain.validate_tokens(run.output) == run.output


def test_free_text_is_cut_off_as_without_a_grammar() -> None:
    run = Run(r"a(.|\n)*", 40)
    run.write(random.Random(1))
    assert len(run.output) == 40
    assert not run.shortened


def test_what_does_not_fit_is_left_to_the_model() -> None:
    run, plain = Run(FLAT, 10), PatternGrammar(FLAT)
    run.write(random.Random(1))
    assert len(run.output) == 10
    assert plain.validate_tokens(run.output) == run.output


@pytest.mark.parametrize("pattern", [LIST, CALLS], ids=["list", "calls"])
def test_another_worker_goes_on_alike_wherever_the_output_was_cut(pattern: str) -> None:
    limit = 120
    whole = Run(pattern, limit)
    rng = random.Random(7)
    while not whole.output or whole.output[-1] != END:
        other = Run(pattern, limit, there=whole.output)
        allowed = whole.allowed()
        assert other.allowed() == allowed, f"after {len(whole.output)} tokens"
        whole.take(rng.choice([token for token in allowed if token] or [END]))
    assert re.fullmatch(pattern, whole.text())


def test_drafts_that_were_taken_back_change_nothing() -> None:
    run, plain = Run(LIST, 120), Run(LIST, 120)
    rng = random.Random(3)
    while run.output[-1:] != [END]:
        drafts = 0
        for _ in range(rng.randrange(4)):
            drafted = rng.choice(run.allowed())
            if drafted == END:
                break
            run.grammar.accept_tokens("r", [drafted])
            drafts += 1
        if drafts:
            run.grammar.rollback(drafts)
        allowed = run.allowed()
        assert allowed == plain.allowed()
        token = rng.choice(allowed)
        run.take(token)
        plain.take(token)


def test_tokens_before_the_grammar_began_count() -> None:
    run = Run(FLAT, 200)
    run.output += [TOKENS.index("a")] * 150
    while run.output[-1] != END:
        run.take(next((token for token in run.allowed() if TOKENS[token] == "x"), run.allowed()[0]))
    assert len(run.output) <= 200
    assert re.fullmatch("a{150}" + FLAT, run.text())


def test_a_search_that_takes_too_long_is_the_last_one() -> None:
    times = iter(range(10_000))
    run = Run(FLAT, 60, clock=lambda: next(times) * SEARCH_S)
    run.write(random.Random(2))
    assert len(run.output) == 60
    assert not run.shortened
    assert next(times) < 10


def test_the_searches_of_a_step_take_less_than_the_step_may() -> None:
    tick_s, reads = SEARCH_S / 30, 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return reads * tick_s

    run, rng, most = Run(CALLS, 120, clock=clock), random.Random(2), 0
    while run.output[-1:] != [END]:
        before = reads
        allowed = run.allowed()
        most = max(most, reads - before)
        run.take(rng.choice([token for token in allowed if token] or [END]))
    assert run.shortened
    assert 30 <= most < 30 * STEP_S / SEARCH_S


def test_a_string_that_grows_is_not_searched_again_while_there_is_room() -> None:
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 0.0

    run = Run(FLAT, 100, clock=clock)
    for text in ("{", '"', "name", '":"', *"xyz"):
        run.allowed()
        run.take(TOKENS.index(text))
    before = reads
    for _ in range(70):
        run.allowed()
        run.take(TOKENS.index("y"))
    assert reads == before


def test_searches_that_find_nothing_end_by_their_time_together() -> None:
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return reads * 1e-5

    run = Run('"a{1000}"', 200, clock=clock)
    run.write(random.Random(2))
    assert len(run.output) == 200
    assert not run.shortened
    assert FRUITLESS_S < reads * 1e-5 < 1.1 * FRUITLESS_S


def test_nothing_is_searched_far_from_the_limit() -> None:
    def clock() -> float:
        raise AssertionError("a search began")

    run = Run(FLAT, WINDOW + 100, clock=clock)
    for text in ("{", '"', "name", '":"'):
        run.allowed()
        run.take(TOKENS.index(text))


def test_a_tokenizer_without_single_characters_completes_less() -> None:
    vocabulary = ClosingVocabulary(Vocabulary(["<end>", "abc"]))
    words = np.array([3], np.uint32)
    assert not vocabulary.in_text(words)
    assert vocabulary.closing(words, []) == 0
    assert vocabulary.closing(np.array([2], np.uint32), []) == 1
    assert vocabulary.closing(np.zeros(1, np.uint32), []) is None
