"""No request that is accepted keeps an engine's step busy for long, whichever field holds the costly value.

Counted is what an engine's process does in one step beside the model: its own code, vLLM's loops over what a
client sent, and the operations that these launch. What vLLM computes for all rows of a batch in one operation
depends on the batch, and not on what a client sent.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.kit.lab.costly_bodies import ALL, CONTROL, work
from tests.kit.models.tiny_tokens import VOCABULARY

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - after the skip

from kvasir.core.errors import RequestError  # noqa: E402
from kvasir.core.requests import Sampling  # noqa: E402
from kvasir_platform.gateway.openai.calls import completion_call  # noqa: E402
from kvasir_platform.gateway.openai.schema.decode import decode_completion  # noqa: E402
from kvasir_platform.gateway.openai.schema.limits import (  # noqa: E402
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_CHOICES_BAD_WORDS,
    MAX_STOP,
    MAX_TOKEN_IDS,
)
from kvasir_workers.engines.vllm.output.grammar_budget import (  # noqa: E402
    BURST_S,
    MODEST_S,
    BudgetedGrammar,
    CallCost,
    GrammarBudget,
    GrammarPool,
)

STEP_S = 0.2
INSTRUCTIONS = 10_000_000
"""About STEP_S of a core: see test_budgets.py."""
OPERATIONS = 10_000
"""About STEP_S: an operation on a GPU takes 5 to 20 µs to launch."""
MODEL_S = 0.01
ROWS = 2 * MAX_CHOICES
"""Choices in a batch: vLLM's default is 256."""

IN_THE_STEP = {
    "bad_words": "compared with each choice's output, one after the other",
    "structured": "a mask for each choice",
}
"""Fields for which an engine's step runs a loop over what the client sent, with the loop."""
OF_THE_BATCH = {
    "temperature": "an operation on all rows",
    "top_p": "as above",
    "top_k": "as above",
    "min_p": "as above",
    "seed": "a generator for each choice, of which there are at most MAX_CHOICES",
    "n": "rows of the batch: at most MAX_CHOICES of one request",
    "presence_penalty": "an operation on all rows and their outputs, which the KV cache bounds",
    "frequency_penalty": "as above",
    "repetition_penalty": "as above",
    "logit_bias": "an operation on at most MAX_TOKEN_IDS entries of each row",
    "allowed_token_ids": "a row of a mask, made once",
    "min_tokens": "an operation on the rows' stop tokens, of which there are at most 128 each",
    "stop_token_ids": "a look into a set",
    "ignore_eos": "a comparison",
    "max_tokens": "a comparison",
    "logprobs": "an operation on all rows, with at most 20 alternatives",
    "prompt_logprobs": "as above, once for a prompt, and bounded for all its positions together",
    "thinking_tokens": "a comparison of the last tokens",
}
IN_THE_FRONT = {"stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"}
"""Text is made in another process than the step."""


def test_every_field_that_reaches_an_engine_is_known_with_its_cost() -> None:
    known = {*IN_THE_STEP, *OF_THE_BATCH, *IN_THE_FRONT}
    assert known == {field.name for field in dataclasses.fields(Sampling)}
    assert len(known) == len(IN_THE_STEP) + len(OF_THE_BATCH) + len(IN_THE_FRONT)


def accepted(**fields: Any) -> Sampling:
    """What reaches the engine of a body with these fields. Raises RequestError."""
    body = decode_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())
    return completion_call(body, VOCABULARY, ALL, control=CONTROL).sampling


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def vllm_file(path: str) -> ModuleType:
    """A module of vLLM that needs no other of it, without importing all of vLLM."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    spec = spec_from_file_location("vllm_file", Path(found.origin).parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n", [1, MAX_CHOICES_BAD_WORDS // MAX_BAD_WORDS, MAX_CHOICES])
@pytest.mark.parametrize("tokens", [1, 256])
def test_the_most_bad_words_of_all_choices_are_compared_within_a_step(n: int, tokens: int) -> None:
    words = MAX_BAD_WORDS
    while True:
        try:
            made = accepted(bad_words=["x" * 200] * words, n=n, temperature=1.0)
            break
        except RequestError:
            words //= 2
    assert made.n * len(made.bad_words) <= MAX_CHOICES_BAD_WORDS
    # vLLM has each word with and without a leading space. Of one token each, all are forbidden in every step.
    entries = [[1] * tokens for _ in range(2 * len(made.bad_words))]
    logits = torch.zeros((made.n, VOCABULARY))
    apply = vllm_file("v1/sample/ops/bad_words.py").apply_bad_words
    said = [[1] * 4096 for _ in range(made.n)]

    def step() -> None:
        apply(logits, dict.fromkeys(range(made.n), entries), said)

    assert work(step, INSTRUCTIONS) > 0
    with Operations() as operations:
        step()
    assert operations.count <= OPERATIONS


def test_bad_words_of_all_choices_are_bounded_together() -> None:
    with pytest.raises(RequestError, match="bad_words × n"):
        accepted(bad_words=["x"] * MAX_BAD_WORDS, n=MAX_CHOICES, temperature=1.0)


def test_lists_of_a_body_have_the_bounds_that_the_costs_are_derived_from() -> None:
    for field, most in (
        ("stop", ["x"] * MAX_STOP),
        ("stop_token_ids", [1] * 128),
        ("allowed_token_ids", [1] * MAX_TOKEN_IDS),
        ("logit_bias", {str(token): 1.0 for token in range(MAX_TOKEN_IDS)}),
        ("logprobs", 20),
        ("n", MAX_CHOICES),
    ):
        accepted(**{"temperature": 1.0, field: most})
        more: Any = most + 1 if isinstance(most, int) else [*most, "1"]
        if isinstance(most, dict):
            more = {**most, "2000": 1.0}
        with pytest.raises(RequestError):
            accepted(**{"temperature": 1.0, field: more})


class Clock:
    """Processor time and time, which pass alike in one thread."""

    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s


class CostlyGrammar:
    """A grammar of which each call takes `cost_s`."""

    def __init__(self, clock: Clock, cost_s: float) -> None:
        self._clock = clock
        self._cost_s = cost_s

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        self._clock.s += self._cost_s

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._clock.s += self._cost_s
        return True


class Mask:
    """Rows that are filled at no cost."""

    def __getitem__(self, row: int) -> Mask:
        return self

    def fill_(self, word: int) -> None:
        """See a tensor."""


def steps(cost_s: float, rules: int = 1, count: int = 60) -> list[float]:
    """The time that grammars take in each step of a full batch, of choices of `rules` different rules."""
    clock, ended = Clock(), list[int]()
    pool, costs = GrammarPool(clock.now), [CallCost() for _ in range(rules)]
    running: dict[int, BudgetedGrammar] = {}
    for row in range(ROWS):
        running[row] = BudgetedGrammar(
            CostlyGrammar(clock, cost_s),
            GrammarBudget(),
            cpu_s=clock.now,
            end=partial(ended.append, row),
            cost=costs[row % rules],
        )
        running[row].pool = pool
    taken = []
    for _ in range(count):
        begun = clock.s
        for row, grammar in running.items():
            grammar.fill_bitmask(Mask(), row)
        taken.append(clock.s - begun)
        clock.s += MODEL_S
        begun = clock.s
        running = {row: grammar for row, grammar in running.items() if grammar.accept_tokens("r", [1])}
        taken[-1] += clock.s - begun
    assert len(ended) == ROWS - len(running)
    return taken


@pytest.mark.parametrize("cost_s", [0.00001, MODEST_S, 0.0004, 0.001, 0.003, 0.009, 0.05, BURST_S, 0.105])
def test_grammars_of_all_choices_take_a_bounded_part_of_a_step(cost_s: float) -> None:
    taken = steps(cost_s)
    assert max(taken) <= STEP_S + 1e-9
    assert steps(cost_s, rules=8)[-1] <= STEP_S


def test_grammars_of_common_cost_are_never_ended_for_what_others_use() -> None:
    assert steps(0.0002)[-1] == pytest.approx(2 * ROWS * 0.0002)


def test_one_costly_grammar_within_its_budget_runs_beside_common_ones() -> None:
    clock = Clock()
    pool, ended = GrammarPool(clock.now), list[str]()
    grammar = BudgetedGrammar(
        CostlyGrammar(clock, 0.004), GrammarBudget(), cpu_s=clock.now, end=lambda: ended.append("ended")
    )
    grammar.pool = pool
    for _ in range(1000):
        grammar.fill_bitmask(Mask(), 0)
        clock.s += MODEL_S
        assert grammar.accept_tokens("r", [1])
    assert not ended


def test_a_grammar_whose_first_mask_is_costly_goes_on() -> None:
    clock, cost_s = Clock(), 0.095
    grammar = CostlyGrammar(clock, cost_s)
    made = BudgetedGrammar(grammar, GrammarBudget(), cpu_s=clock.now, end=lambda: None)
    made.pool = GrammarPool(clock.now)
    for _ in range(20):
        made.fill_bitmask(Mask(), 0)
        clock.s += MODEL_S
        grammar._cost_s = 0.001
        assert made.accept_tokens("r", [1])
