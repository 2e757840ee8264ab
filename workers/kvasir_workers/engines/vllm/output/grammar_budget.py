"""A budget of processor time for each grammar, so that one request cannot delay all streams of its worker.

The engine core computes masks of the next token between two steps of the model, for all constrained requests
one after the other. Checks of patterns and grammars before a request is accepted bound what is known to be
costly, but the cost depends on the vocabulary and on the output too. So the time of each call is measured
here, and a request whose grammar exceeds its budget ends: its next token is not accepted.

Nothing of vLLM is imported: a grammar is anything with the methods of vLLM's StructuredOutputGrammar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TOO_COSTLY = "grammar_too_costly"
"""`stop_reason` of a request that was ended, and the code of the error that its client gets."""
STEP_S = 0.01
"""Processor time that a request may use in every step, in seconds."""
BURST_S = 0.1
"""Processor time that it may use beyond that, in one step or over several."""


class GrammarBudget:
    """The account of one request: each step pays in `step_s`; the balance is at most `burst_s` + `step_s`.

    Obligation: over any n steps that did not exceed it, the time spent is at most n * step_s + burst_s."""

    __slots__ = ("_balance", "_burst_s", "_step_s", "exceeded")

    def __init__(self, step_s: float = STEP_S, burst_s: float = BURST_S) -> None:
        self._step_s = step_s
        self._burst_s = burst_s
        self._balance = burst_s
        self.exceeded = False

    def step(self) -> None:
        """A step begins."""
        self._balance = min(self._balance, self._burst_s) + self._step_s

    def spend(self, seconds: float) -> None:
        """The grammar used `seconds` of processor time in this step."""
        self._balance -= seconds
        if self._balance < 0.0:
            self.exceeded = True


class BudgetedGrammar:
    """A grammar whose calls are paid from `budget`; the rest is passed to `grammar`. `cpu_s` reads the
    processor time of the calling thread, which does not count the time that other processes take. `end` is
    called once, when the budget is exceeded. From then on every token is in the mask, which costs nothing,
    and none is accepted, so that the scheduler ends the request."""

    __slots__ = ("_cpu_s", "_end", "_grammar", "budget")

    def __init__(
        self, grammar: Any, budget: GrammarBudget, *, cpu_s: Callable[[], float], end: Callable[[], None]
    ) -> None:
        self._grammar = grammar
        self._cpu_s = cpu_s
        self._end = end
        self.budget = budget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See StructuredOutputGrammar. The tokens of a step have been sampled."""
        if self.budget.exceeded:
            return False
        begun = self._cpu_s()
        accepted = bool(self._grammar.accept_tokens(request_id, tokens))
        self._spent(begun)
        self.budget.step()
        return accepted and not self.budget.exceeded

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See StructuredOutputGrammar."""
        if self.budget.exceeded:
            return []
        begun = self._cpu_s()
        valid: list[int] = self._grammar.validate_tokens(tokens)
        self._spent(begun)
        return valid

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        """See StructuredOutputGrammar."""
        if self.budget.exceeded:
            bitmask[index].fill_(-1)
            return
        begun = self._cpu_s()
        self._grammar.fill_bitmask(bitmask, index)
        self._spent(begun)

    def rollback(self, count: int) -> None:
        """See StructuredOutputGrammar."""
        if not self.budget.exceeded:
            self._grammar.rollback(count)

    def is_terminated(self) -> bool:
        """See StructuredOutputGrammar. A grammar over its budget still has to reject a token."""
        return not self.budget.exceeded and bool(self._grammar.is_terminated())

    def _spent(self, begun: float) -> None:
        self.budget.spend(self._cpu_s() - begun)
        if self.budget.exceeded:
            self._end()
