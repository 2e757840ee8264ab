"""What the requests of a canary and of the model beside it came to, compared in pairs.

Each request of the one is compared with the newest of the other that has no partner yet. Load and prompts
change over a day; they have changed little between two requests that end after each other.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from kvasir.core.errors import CapacityError
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.reasons import OK, REASONS

CRITERIA: Final = ("errors", "slo", "ttft", "itl")
"""What a canary must not be worse in."""
_UNPAIRED = 64
"""Outcomes that wait for a partner, of each of the two."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `slo_met` is None if it is not judged, times are None if it had none, in seconds."""

    failed: bool
    slo_met: bool | None = None
    ttft_s: float | None = None
    itl_s: float | None = None


def outcome_of(summary: RequestSummary) -> Outcome | None:
    """Return the outcome of a request that ended; None if its client or the request itself ended it."""
    if summary.outcome == OK:
        return Outcome(False, summary.slo_met, summary.ttft_s, summary.itl_s)
    return refused(summary.outcome)


def refused(code: str) -> Outcome | None:
    """Return the outcome of a request that ended with this code; None if the server is not at fault."""
    if code == "shutting_down":
        return None
    reason = REASONS.get(code)
    status = 500 if reason is None else reason.status
    return Outcome(True, False) if status == 429 or status >= 500 else None


def is_fault(error: BaseException) -> bool:
    """Return whether another model may answer in place of one that ended a request with this error."""
    code = getattr(error, "code", "internal_error")
    return code != "router_lost" and (isinstance(error, CapacityError) or refused(code) is not None)


class PairedOutcomes:
    """Counts of one route since they were last taken. `slowdown` is CanarySpec.max_slowdown."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._unpaired: dict[bool, deque[Outcome]] = {side: deque(maxlen=_UNPAIRED) for side in (False, True)}
        self._counts: Counter[str] = Counter()

    def add(self, outcome: Outcome, *, canary: bool, step: int) -> None:
        """Count a request of the canary, or of the model beside it, in this step."""
        counts, name = self._counts, "canary" if canary else "stable"
        counts[f"{name}_requests"] += 1
        counts[f"{name}_failed"] += outcome.failed
        counts[f"{name}_slo_missed"] += outcome.slo_met is False
        others = self._unpaired[not canary]
        if not others:
            self._unpaired[canary].append(outcome)
            return
        other = others.pop()
        tried, known = (outcome, other) if canary else (other, outcome)
        counts[f"compared_{step}"] += 1
        for criterion, worse in self._judged(tried, known).items():
            if worse is not None:
                counts[f"{criterion}_{'worse' if worse else 'better'}"] += 1

    def take(self) -> dict[str, int]:
        """Return the counts, and begin new ones."""
        taken, self._counts = self._counts, Counter()
        return {name: count for name, count in taken.items() if count}

    def begin(self) -> None:
        """Forget all of an earlier rollout."""
        self._counts.clear()
        for waiting in self._unpaired.values():
            waiting.clear()

    def _judged(self, tried: Outcome, known: Outcome) -> dict[str, bool | None]:
        return {
            "errors": _differ(tried.failed, known.failed),
            "slo": _differ(tried.slo_met is False, known.slo_met is False),
            "ttft": self._slower(tried.ttft_s, known.ttft_s),
            "itl": self._slower(tried.itl_s, known.itl_s),
        }

    def _slower(self, tried: float | None, known: float | None) -> bool | None:
        return None if tried is None or known is None else tried > known * self._slowdown


def _differ(tried: bool, known: bool) -> bool | None:
    """Return whether the one that was tried is the worse one; None if they are equal."""
    return None if tried == known else tried
