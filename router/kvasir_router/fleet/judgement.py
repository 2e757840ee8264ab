"""Judges ended decisions: their regret, and its sum by cause. The definition is in
kvasir_router.decide.regret.

A decision is judged if its request ended well with the placement of its first start: after a retry, a
failover or another decode worker, the measurements are of more than one placement. Judging takes longer than
deciding. So a busy router judges a part of its decisions for the sum, and any other when somebody asks for
its record.
"""

from __future__ import annotations

from kvasir.ports.router import RegretView, RequestSummary
from kvasir.ports.routing import RoutingTarget, TermTable
from kvasir.telemetry.reasons import OK
from kvasir_router.decide.regret import (
    CAUSES,
    Hindsight,
    JudgedDecision,
    JudgedPlace,
    Regret,
    judgeable,
    regret,
)
from kvasir_router.fleet.decision_entry import DecisionEntry

JUDGED_PER_S = 10.0
"""Decisions that a router judges for each model in a second, without being asked."""
_TOGETHER = 5.0
"""Decisions that a busy router judges one after the other: alone, each would find the code and the data of
judging out of the processor's caches, which takes three times as long (by hand)."""


class JudgementBudget:
    """Allows JUDGED_PER_S decisions a second, and those of one second at once."""

    __slots__ = ("_left", "_now", "_waits")

    def __init__(self) -> None:
        self._left = JUDGED_PER_S
        self._now = 0.0
        self._waits = False

    def take(self, now: float) -> bool:
        """Return whether a decision that ended at `now` seconds may be judged."""
        if now > self._now:
            self._left = min(JUDGED_PER_S, self._left + (now - self._now) * JUDGED_PER_S)
            self._now = now
        if self._waits and self._left < _TOGETHER:
            return False
        self._left -= 1.0
        self._waits = self._left < 1.0
        return True


class RegretTotals:
    """Sums over judged decisions."""

    __slots__ = ("_causes", "_judged", "_regretted")

    def __init__(self) -> None:
        self._judged = self._regretted = 0
        self._causes = [0.0] * len(CAUSES)

    def add(self, found: Regret) -> None:
        """Add a judged decision."""
        self._judged += 1
        if found.seconds:
            self._regretted += 1
            self._causes = [one + other for one, other in zip(self._causes, found.causes, strict=True)]

    def view(self) -> RegretView:
        """Return the sums."""
        return RegretView(self._judged, self._regretted, dict(zip(CAUSES, self._causes, strict=True)))


def kept_regret(entry: DecisionEntry) -> Regret | None:
    """Return the regret of a decision whose request has ended, judged at the first call and kept in the
    entry; None if it cannot be judged."""
    if entry.summary is not None and not entry.judged:
        entry.judged = True
        entry.regret = judge(entry, entry.summary)
        if entry.regret is not None and entry.regret.seconds:
            entry.better = places_of(entry, entry.regret)
    return entry.regret


def judge(entry: DecisionEntry, summary: RequestSummary) -> Regret | None:
    """Return the regret of an ended request's decision; None if it cannot be judged."""
    ttft_s = _ttft_s(entry, summary)
    if ttft_s is None:
        return None
    kept = entry.tables
    if not judgeable(kept):
        return None
    usage, plan = summary.usage, entry.plan
    tables = {table.part: table for table in kept}
    rows = {part: _rows(entry, table) for part, table in tables.items()}
    computing = plan.prefill_target
    fixed_s, step_s = _prefill_of(entry, computing)
    decision = JudgedDecision(
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=plan.predicted_cached_tokens,
        output_tokens=float(entry.output_tokens * entry.choices),
        slo_ttft_s=entry.slo.ttft_s,
        place=JudgedPlace(_row(rows, "whole", computing), _row(rows, "prefill", computing), fixed_s, step_s),
        decoded=None if plan.prefill is None else _row(rows, "decode", plan.decode),
        whole=tables.get("whole"),
        prefill=tables.get("prefill"),
        decode=tables.get("decode"),
        workers=(_workers(rows, "prefill"), _workers(rows, "decode")),
    )
    known = Hindsight(
        ttft_s=ttft_s,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        wait_s=summary.waited_s,
        compute_s=summary.computed_s,
        load_s=summary.tier_s,
        transfer_s=summary.pulled_s,
    )
    return regret(decision, known)


def _ttft_s(entry: DecisionEntry, summary: RequestSummary) -> float | None:
    """Return the TTFT from the decision; None if the request did not run as this decision placed it."""
    first_s, decided_s = summary.first_token_s, entry.decided.now_s
    if summary.outcome != OK or first_s is None or summary.routed_s != decided_s:
        return None
    if summary.retries or summary.migrations or summary.usage.prompt_tokens != entry.prompt_tokens:
        return None
    return first_s - decided_s


_Rows = dict[str, list[RoutingTarget]]
"""The places in each table, in order."""


def _rows(entry: DecisionEntry, table: TermTable) -> list[RoutingTarget]:
    return [entry.targets[row] for row in table.rows.tolist()]


def _row(rows: _Rows, part: str, target: RoutingTarget) -> int | None:
    found = rows.get(part, [])
    return found.index(target) if target in found else None


def _workers(rows: _Rows, part: str) -> list[str]:
    return [target.worker_id for target in rows.get(part, ())]


def _prefill_of(entry: DecisionEntry, target: RoutingTarget) -> tuple[float, float]:
    """Return the fixed part of a prefill there, and the step that ran there."""
    place = entry.targets.index(target)
    fixed_s, step_fixed_s, step_stream_s = entry.rates[:, place].tolist()
    streams = entry.streams(place)
    return fixed_s, step_fixed_s + step_stream_s * streams if streams else 0.0


def places_of(entry: DecisionEntry, found: Regret) -> tuple[str, ...]:
    """Return what would have cost the least, as the part and the place."""
    parts = ("whole",) if len(found.best) == 1 else ("prefill", "decode")
    tables = {table.part: table for table in entry.tables}
    targets = [
        entry.targets[tables[part].rows.item(row)] for part, row in zip(parts, found.best, strict=True)
    ]
    return tuple([f"{part} {target.worker_id}" for part, target in zip(parts, targets, strict=True)])
