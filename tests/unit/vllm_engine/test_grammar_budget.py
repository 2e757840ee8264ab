"""The budget of time of one request's grammar, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvasir_workers.engines.vllm.output.grammar_budget import BudgetedGrammar, GrammarBudget


@dataclass
class Row:
    """One row of a mask."""

    words: list[int]

    def fill_(self, word: int) -> None:
        self.words[:] = [word] * len(self.words)


@dataclass
class Grammar:
    """Whose calls take `cost` seconds of its own clock."""

    cost: float = 0.0
    clock: float = 0.0
    calls: list[str] = field(default_factory=list)
    terminated: bool = False

    def _used(self, call: str) -> None:
        self.calls.append(call)
        self.clock += self.cost

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._used("accept")
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self._used("validate")
        return tokens

    def fill_bitmask(self, bitmask: list[Row], index: int) -> None:
        self._used("fill")
        bitmask[index].fill_(7)

    def rollback(self, count: int) -> None:
        self._used("rollback")

    def is_terminated(self) -> bool:
        return self.terminated


def budgeted(grammar: Grammar, ends: list[str]) -> BudgetedGrammar:
    budget = GrammarBudget(step_s=1.0, burst_s=10.0)
    return BudgetedGrammar(grammar, budget, cpu_s=lambda: grammar.clock, end=lambda: ends.append("ended"))


def run(made: BudgetedGrammar, steps: int) -> int:
    """Return the number of steps that were accepted."""
    for step in range(steps):
        made.fill_bitmask([Row([0])], 0)
        if not made.accept_tokens("r", [1]):
            return step
    return steps


def test_a_grammar_within_its_budget_runs_as_it_would_alone() -> None:
    grammar, ends = Grammar(cost=0.5), list[str]()
    made = budgeted(grammar, ends)
    assert run(made, 1000) == 1000
    assert made.validate_tokens([1, 2]) == [1, 2]
    made.rollback(1)
    assert grammar.calls[-1] == "rollback"
    assert not ends


def test_one_call_that_takes_too_long_ends_the_request() -> None:
    grammar, ends = Grammar(cost=11.5), list[str]()
    made = budgeted(grammar, ends)
    made.fill_bitmask([Row([0])], 0)
    assert ends == ["ended"]
    assert not made.accept_tokens("r", [1])


def test_calls_that_each_take_a_little_too_long_end_the_request_in_the_end() -> None:
    ends = list[str]()
    assert run(budgeted(Grammar(cost=0.6), ends), 1000) < 60
    assert ends == ["ended"]


def test_a_grammar_over_its_budget_is_not_called_again() -> None:
    grammar, ends = Grammar(cost=20.0, terminated=True), list[str]()
    made = budgeted(grammar, ends)
    made.fill_bitmask([Row([0])], 0)
    mask = [Row([0, 0])]
    made.fill_bitmask(mask, 0)
    made.rollback(1)
    assert mask[0].words == [-1, -1], "every token, since what is sampled is thrown away"
    assert made.validate_tokens([1]) == []
    assert not made.is_terminated(), "a grammar that has ended would accept every token"
    assert grammar.calls == ["fill"]
    assert ends == ["ended"]


@given(st.lists(st.floats(0.0, 15.0), max_size=200))
def test_the_time_of_any_run_of_steps_is_bounded(costs: list[float]) -> None:
    budget, spent = GrammarBudget(step_s=1.0, burst_s=10.0), list[float]()
    for cost in costs:
        budget.step()
        budget.spend(cost)
        if budget.exceeded:
            break
        spent.append(cost)
    for begin in range(len(spent)):
        assert sum(spent[begin:]) <= len(spent[begin:]) * 1.0 + 10.0 + 1e-9
