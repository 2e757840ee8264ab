"""A budget of processor time for each grammar, so that one request cannot delay all streams of its worker.

The engine core computes masks of the next token between two steps of the model, for all constrained requests
one after the other. Checks of patterns and grammars before a request is accepted bound what is known to be
costly, but the cost depends on the vocabulary and on the output too. So the time of each call is measured
here, and a request whose grammar exceeds its budget ends: its next token is not accepted. Many requests, or
the choices of one, may each stay within theirs; what all of them may use together is bounded too.

Nothing of vLLM is imported: a grammar is anything with the methods of vLLM's StructuredOutputGrammar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TOO_COSTLY = "grammar_too_costly"
"""`stop_reason` of a request that was ended, and the code of the error that its client gets."""
STEP_S = 0.01
"""Processor time that a request may use in every step, in seconds."""
BURST_S = 0.1
"""Processor time that it may use beyond that, in one step or over several."""
POOL_RATE = 0.5
POOL_BURST_S = 0.09
"""Share of the time that all grammars of an engine may use, and processor time beyond it, in seconds. They
delay no step by more than POOL_BURST_S / (1 - POOL_RATE), except for the first call of a grammar."""
MODEST_S = 0.0003
"""Processor time of a call, in seconds, that is always allowed: masks of common schemas take less."""


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


class GrammarPool:
    """The account of all grammars of an engine: time pays in. `now` reads a clock in seconds. Thread-safe.

    Obligation: in any interval of T seconds, calls that it affords take at most `rate` * T + `burst_s`, if
    they take what was expected of them."""

    def __init__(
        self, now: Callable[[], float], rate: float = POOL_RATE, burst_s: float = POOL_BURST_S
    ) -> None:
        self._now = now
        self._rate = rate
        self._burst_s = burst_s
        self._lock = threading.Lock()
        self._balance = burst_s
        self._at_s = now()

    def affords(self, seconds: float) -> bool:
        """Return whether a call of `seconds` may be made now. The first call of a grammar may take much
        longer than the next, so that half of the burst is enough for any."""
        with self._lock:
            self._settle(0.0)
            return self._balance >= min(seconds, self._burst_s / 2)

    def spend(self, seconds: float) -> None:
        """A grammar used `seconds` of processor time."""
        with self._lock:
            self._settle(seconds)

    def _settle(self, seconds: float) -> None:
        now = self._now()
        self._balance = min(self._balance + (now - self._at_s) * self._rate - seconds, self._burst_s)
        self._at_s = now


class CallCost:
    """What calls of the grammars of one rule took lately, in seconds: those of all choices of a request."""

    __slots__ = ("expected_s",)

    def __init__(self) -> None:
        self.expected_s = 0.0

    def took(self, seconds: float) -> None:
        """A call took that long; dearer ones are forgotten by halves."""
        self.expected_s = max(seconds, self.expected_s / 2)


class BudgetedGrammar:
    """A grammar whose calls are paid from `budget`; the rest is passed to `grammar`. `cpu_s` reads the
    processor time of the calling thread, which does not count the time that other processes take. Calls in
    the engine's step are also paid from `pool`, once it is set; a call that it does not afford, by the `cost`
    of the earlier ones, is not made. `end` is called once, when either is exceeded. From then on every token
    is in the mask, which costs nothing, and none is accepted, so that the scheduler ends the request."""

    __slots__ = ("_cost", "_cpu_s", "_end", "_grammar", "budget", "pool")

    def __init__(
        self,
        grammar: Any,
        budget: GrammarBudget,
        *,
        cpu_s: Callable[[], float],
        end: Callable[[], None],
        cost: CallCost | None = None,
    ) -> None:
        self._grammar = grammar
        self._cpu_s = cpu_s
        self._end = end
        self._cost = CallCost() if cost is None else cost
        self.budget = budget
        self.pool: GrammarPool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See StructuredOutputGrammar. The tokens of a step have been sampled."""
        if not self._may_call():
            return False
        begun = self._cpu_s()
        accepted = bool(self._grammar.accept_tokens(request_id, tokens))
        self._spent(begun)
        self.budget.step()
        return accepted and not self.budget.exceeded

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See StructuredOutputGrammar."""
        if not self._may_call():
            return []
        begun = self._cpu_s()
        valid: list[int] = self._grammar.validate_tokens(tokens)
        self._spent(begun)
        return valid

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        """See StructuredOutputGrammar."""
        if not self._may_call():
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
        seconds = self._cpu_s() - begun
        self.budget.spend(seconds)
        self._cost.took(seconds)
        if self.pool is not None:
            self.pool.spend(seconds)
        if self.budget.exceeded:
            self._end()

    def _may_call(self) -> bool:
        """Return whether the grammar may be called; end the request if the pool has no time for it."""
        expected_s = self._cost.expected_s
        if self.budget.exceeded:
            return False
        if self.pool is None or expected_s <= MODEST_S or self.pool.affords(expected_s):
            return True
        self.budget.exceeded = True
        self._end()
        return False
