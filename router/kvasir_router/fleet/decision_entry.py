"""One decision as it is kept: its arrays, trimmed to the best places, and what they become on request.

Few of many decisions are ever looked up, so a decision is converted to a record only then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kvasir.core.locality import LinkClass
from kvasir.core.requests import SloClass
from kvasir.ports.router import CandidateRecord, DecisionRecord, PhaseRecord, RequestSummary
from kvasir.ports.routing import (
    SCORE,
    Candidates,
    FloatColumn,
    IntColumn,
    Plan,
    RequestView,
    RoutingTarget,
    TermTable,
)
from kvasir.telemetry.reasons import OK
from kvasir_router.decide.regret import CAUSES, Regret

PLACES = 16
"""Number of places kept per part."""

_FACTS = (
    "cached_tokens",
    "queued_prefill_tokens",
    "waiting",
    "streams",
    "reserved_kv_tokens",
    "held_tokens",
    "kv_tokens",
)
_STREAMS = _FACTS.index("streams")
_RATES = ("prefill_fixed_s", "step_fixed_s", "step_stream_s")
_TIERS = ("cpu_tokens", "disk_tokens", "remote_tokens")
_FIGURES_OF = attrgetter(*_FACTS, *[f"rates.{rate}" for rate in _RATES], "tier_tokens")
_FIGURE_BYTES = 8

About = Callable[[tuple[RoutingTarget, ...]], tuple[tuple[str, str], ...]]
"""The pool of each place, and how well the router knows its cache."""


class Decided(NamedTuple):
    """Arrival and decision of a request on the router's clock, and the duration of the decision in seconds of
    the stopwatch. `policy` is the one that the request named, "" for that of the deployment."""

    arrival_s: float
    now_s: float
    took_s: float
    policy: str = ""


class DecisionEntry:
    """One decision. The rows of its tables are places in `targets`. For the same places, `about` has the pool
    and the KV state, `facts` a row for each of _FACTS, `rates` a row for each of _RATES, and `tiers` a column
    for each of _TIERS. `regret` and `better`, the places that would have cost less, are set by judging.

    The figures are kept as bytes: made and freed with each request, an array takes eight times as long."""

    __slots__ = (
        "_figures",
        "about",
        "attempt",
        "better",
        "choices",
        "decided",
        "judged",
        "omitted",
        "output_tokens",
        "plan",
        "prompt_tokens",
        "regret",
        "slo",
        "summary",
        "tables",
        "targets",
    )

    def __init__(
        self,
        request: RequestView,
        candidates: Candidates,
        plan: Plan,
        *,
        decided: Decided,
        attempt: int,
        about: About,
    ) -> None:
        # The request itself is not kept: its block hashes are as long as its prompt.
        self.prompt_tokens: int = request.prompt_tokens
        self.output_tokens: int = request.output_tokens
        self.choices: int = request.choices
        self.slo: SloClass = request.slo
        self.decided = decided
        self.attempt = attempt
        self.summary: RequestSummary | None = None
        self.judged = False
        self.regret: Regret | None = None
        self.better: tuple[str, ...] = ()
        self.plan = plan
        self.tables = tables = plan.tables or _unscored(candidates, plan)
        self.targets = candidates.targets
        self.omitted = 0
        self._figures = b"".join(_FIGURES_OF(candidates))
        if len(candidates) > PLACES:
            # The kept arrays must not grow with the fleet.
            self.omitted = sum([max(0, len(table.rows) - PLACES) for table in tables])
            tables = tuple([_trimmed(table, candidates, plan) for table in tables])
            rows = np.concatenate([table.rows for table in tables])
            kept = self.facts[:, rows], self.rates[:, rows], self.tiers[rows]
            self._figures = b"".join([each.tobytes() for each in kept])
            self.targets = tuple([candidates.targets[row] for row in rows.tolist()])
            self.tables = _renumbered(tables)
            self.plan = replace(plan, tables=())
        self.about = about(self.targets)

    @property
    def facts(self) -> IntColumn:
        """_FACTS x places."""
        places = len(self.targets)
        facts = np.frombuffer(self._figures, dtype=np.int64, count=len(_FACTS) * places)
        return facts.reshape(len(_FACTS), places)

    @property
    def rates(self) -> FloatColumn:
        """_RATES x places."""
        places = len(self.targets)
        before = len(_FACTS) * places * _FIGURE_BYTES
        rates = np.frombuffer(self._figures, np.float64, len(_RATES) * places, before)
        return rates.reshape(len(_RATES), places)

    @property
    def tiers(self) -> IntColumn:
        """Places x _TIERS."""
        before = (len(_FACTS) + len(_RATES)) * len(self.targets) * _FIGURE_BYTES
        return np.frombuffer(self._figures, np.int64, -1, before).reshape(-1, len(_TIERS))

    def streams(self, place: int) -> int:
        """Return the sequences that decoded at a place."""
        return int(self.facts.item(_STREAMS, place))


def _unscored(candidates: Candidates, plan: Plan) -> tuple[TermTable, ...]:
    """Tables of the eligible places without terms, for a policy that makes none."""
    if plan.prefill is None:
        parts = [("whole", candidates.decodes)]
    else:
        parts = [("prefill", candidates.prefills), ("decode", candidates.decodes)]
    eligible = [(part, np.flatnonzero(may)) for part, may in parts]
    return tuple([TermTable(part, "", rows, (), np.zeros((len(rows), 0))) for part, rows in eligible])


def chosen_target(part: str, plan: Plan) -> RoutingTarget | None:
    """Return the target that the plan chose for a part; None for a part that is not run."""
    if part == "prefill":
        return plan.prefill
    return plan.decode if (part == "whole") == (plan.prefill is None) else None


def table_costs(table: TermTable) -> FloatColumn:
    """Return the sums of the terms; the smallest is best."""
    totals: FloatColumn = table.values.sum(axis=1)
    return -totals if table.unit == SCORE else totals


def _trimmed(table: TermTable, candidates: Candidates, plan: Plan) -> TermTable:
    """Return the table with its best rows, which always include the chosen one."""
    if len(table.rows) <= PLACES:
        return table
    best = np.argpartition(table_costs(table), PLACES - 1)[:PLACES]
    target = chosen_target(table.part, plan)
    if target is not None and target not in [candidates.targets[row] for row in table.rows[best].tolist()]:
        (at,) = np.nonzero(table.rows == candidates.targets.index(target))
        best[-1:] = at
    links = None if table.links is None else table.links[best]
    return TermTable(table.part, table.unit, table.rows[best], table.names, table.values[best], links)


def _renumbered(tables: tuple[TermTable, ...]) -> tuple[TermTable, ...]:
    """Return the tables with rows numbered consecutively."""
    ends = np.cumsum([len(table.rows) for table in tables]).tolist()
    return tuple(
        [
            replace(table, rows=np.arange(end - len(table.rows), end))
            for table, end in zip(tables, ends, strict=True)
        ]
    )


def record_of(request_id: str, policy: str, entry: DecisionEntry) -> DecisionRecord:
    """Return the record of a decision."""
    plan, decided, summary = entry.plan, entry.decided, entry.summary
    well = summary is not None and summary.outcome == OK
    return DecisionRecord(
        request_id=request_id,
        policy=decided.policy or policy,
        reason=plan.reason,
        mode=plan.mode,
        decided_s=decided.now_s,
        decided_in_s=decided.took_s,
        attempt=entry.attempt,
        prompt_tokens=entry.prompt_tokens,
        expected_output_tokens=entry.output_tokens,
        slo=entry.slo.name,
        prefill_worker=None if plan.prefill is None else plan.prefill.worker_id,
        decode_worker=plan.decode.worker_id,
        predicted_cached_tokens=plan.predicted_cached_tokens,
        predicted_ttft_s=plan.predicted_ttft_s,
        parts=tuple(_parts(entry)),
        omitted=entry.omitted,
        queued_s=decided.now_s - decided.arrival_s,
        slo_ttft_s=entry.slo.ttft_s,
        slo_itl_s=entry.slo.itl_s,
        outcome=None if summary is None else summary.outcome,
        actual_cached_tokens=summary.usage.cached_tokens if summary is not None and well else None,
        predicted_tier_tokens=sum(plan.predicted_tier_tokens),
        actual_tier_tokens=summary.usage.tier_tokens if summary is not None and well else None,
        actual_ttft_s=None if summary is None else summary.ttft_s,
        actual_itl_s=None if summary is None else summary.itl_s,
        slo_met=None if summary is None else summary.slo_met,
        regret_s=None if entry.regret is None else entry.regret.seconds,
        regret_causes=_by_cause(entry.regret),
        better=entry.better,
        better_ttft_s=entry.regret.best_ttft_s if entry.regret is not None and entry.better else None,
    )


def _by_cause(found: Regret | None) -> dict[str, float]:
    """Return the causes that have a part of the regret."""
    if found is None:
        return {}
    return {cause: part for cause, part in zip(CAUSES, found.causes, strict=True) if part}


def _parts(entry: DecisionEntry) -> Iterator[PhaseRecord]:
    for table in entry.tables:
        target = chosen_target(table.part, entry.plan)
        ranked: list[tuple[float, bool, CandidateRecord]] = []
        links = [None] * len(table.rows) if table.links is None else table.links.tolist()
        for row, values, cost, link in zip(
            table.rows.tolist(), table.values, table_costs(table), links, strict=True
        ):
            place = _place(entry, row, table, values, target)
            if link is not None:
                place = replace(place, link=LinkClass(link).label)
            ranked.append((float(cost), not place.chosen, place))
        ranked.sort(key=lambda each: each[:2])
        yield PhaseRecord(table.part, table.unit, tuple(place for *_, place in ranked))


def _place(
    entry: DecisionEntry, row: int, table: TermTable, values: FloatColumn, chosen: RoutingTarget | None
) -> CandidateRecord:
    target, (pool, kv_state) = entry.targets[row], entry.about[row]
    facts = (*entry.facts[:, row].tolist(), *entry.tiers[row].tolist())
    return CandidateRecord(
        worker_id=target.worker_id,
        rank=target.rank,
        pool=pool,
        kv_state=kv_state,
        facts=dict(zip((*_FACTS, *_TIERS), map(float, facts), strict=True)),
        terms=dict(zip(table.names, map(float, values), strict=True)),
        total=float(values.sum()),
        chosen=target == chosen,
    )
