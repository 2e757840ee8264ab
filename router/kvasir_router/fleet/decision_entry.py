"""One decision as it is kept: figures of its best places as bytes, from which its tables are read on request.

Few of many decisions are ever looked up, so arrays and records are made only then: made and freed with each
request, an array takes eight times as long as its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir.core.figures import Arrays
from kvasir.core.locality import LinkClass
from kvasir.core.requests import SloClass
from kvasir.core.values import contents
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
from kvasir.ports.views.packed import packed
from kvasir.telemetry.reasons import OK
from kvasir_router.decide.packing import Decided, TableHead, decision_of, places_of
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
_TIERS = ("cpu_tokens", "disk_tokens", "remote_tokens")
_STREAMS = _FACTS.index("streams")
_RATES = ("prefill_fixed_s", "step_fixed_s", "step_stream_s")
_OF_CANDIDATES = Arrays((*_FACTS, *(f"rates.{rate}" for rate in _RATES), "tier_tokens"))
_ARRAYS = Arrays(())
_FIGURE_BYTES = 8
_FIGURES = len(_FACTS) + len(_RATES) + len(_TIERS)
"""Those of each place."""

About = Callable[[tuple[RoutingTarget, ...]], tuple[tuple[str, str], ...]]
"""The pool of each place, and how well the router knows its cache."""


@dataclass(slots=True, eq=False, init=False)
class DecisionEntry:
    """One decision. The rows of its tables are places in `targets`; `omitted` rows of the policy's were left
    out. For the same places, `about` has the pool and the KV state. `figures` are those of the places, then
    those of the tables, which `heads` describes, and what Arrays.joined adds. `output_tokens` are those
    expected of each choice. `regret` and `better`, the places that would have cost less, are set by
    judging."""

    prompt_tokens: int
    output_tokens: int
    choices: int
    slo: SloClass
    decided: Decided
    attempt: int
    plan: Plan
    heads: tuple[TableHead, ...]
    figures: bytes
    targets: tuple[RoutingTarget, ...]
    about: tuple[tuple[str, str], ...]
    omitted: int
    summary: RequestSummary | None
    judged: bool
    regret: Regret | None
    better: tuple[str, ...]

    def __init__(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        choices: int,
        slo: SloClass,
        decided: Decided,
        attempt: int,
        plan: Plan,
        heads: tuple[TableHead, ...],
        figures: bytes,
        targets: tuple[RoutingTarget, ...],
        about: tuple[tuple[str, str], ...],
        omitted: int,
        summary: RequestSummary | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.choices = choices
        self.slo = slo
        self.decided = decided
        self.attempt = attempt
        self.plan = plan
        self.heads = heads
        self.figures = figures
        self.targets = targets
        self.about = about
        self.omitted = omitted
        self.summary = summary
        self.judged = False
        self.regret = None
        self.better = ()

    @property
    def facts(self) -> IntColumn:
        """_FACTS x places."""
        places = len(self.targets)
        facts = np.frombuffer(self.figures, np.int64, len(_FACTS) * places)
        return facts.reshape(len(_FACTS), places)

    @property
    def rates(self) -> FloatColumn:
        """The predicted fixed part of a prefill, and that of a step and what each of its streams adds, in
        seconds: a row each."""
        places = len(self.targets)
        before = len(_FACTS) * places * _FIGURE_BYTES
        rates = np.frombuffer(self.figures, np.float64, len(_RATES) * places, before)
        return rates.reshape(len(_RATES), places)

    @property
    def tiers(self) -> IntColumn:
        """Places x _TIERS."""
        places = len(self.targets)
        before = (len(_FACTS) + len(_RATES)) * places * _FIGURE_BYTES
        return np.frombuffer(self.figures, np.int64, len(_TIERS) * places, before).reshape(-1, len(_TIERS))

    @property
    def tables(self) -> tuple[TermTable, ...]:
        """The policy's tables, with the rows that are kept. They are read from the figures at each call."""
        made, at, number = [], _FIGURES * len(self.targets) * _FIGURE_BYTES, 0
        (columns,) = np.frombuffer(self.figures, np.uint64, 1, len(self.figures) - _FIGURE_BYTES).tolist()
        for part, unit, names, count, linked in self.heads:
            rows = np.frombuffer(self.figures, np.int64, count, at)
            at += count * _FIGURE_BYTES
            values = np.frombuffer(self.figures, np.float64, count * len(names), at)
            # Sums over the values depend on their order in memory.
            by_columns = columns >> (number + 1) & 1
            values = values.reshape((count, len(names)), order="F" if by_columns else "C")
            at += count * len(names) * _FIGURE_BYTES
            links: NDArray[np.uint8] | None = None
            if linked:
                links = np.frombuffer(self.figures, np.uint8, count, at)
                at += count
            number += 3 if linked else 2
            made.append(TermTable(part, unit, rows, names, values, links))
        return tuple(made)

    def streams(self, place: int) -> int:
        """Return the sequences that decoded at a place."""
        return int(self.facts.item(_STREAMS, place))


def entry_of(
    request: RequestView,
    candidates: Candidates,
    plan: Plan,
    *,
    decided: Decided,
    attempt: int,
    about: About,
) -> DecisionEntry:
    """Return what is kept of a decision. The request itself is not: its block hashes are as long as its
    prompt."""
    tables, targets = plan.tables or _unscored(candidates, plan), candidates.targets
    omitted = 0
    kept: list[NDArray[Any]] = []
    if len(targets) > PLACES:
        # What is kept must not grow with the fleet.
        omitted = sum([max(0, len(table.rows) - PLACES) for table in tables])
        tables = tuple([_trimmed(table, candidates, plan) for table in tables])
        rows = np.concatenate([table.rows for table in tables])
        kept = [each.take(rows, 0) for each in _figures(candidates)]
        targets = tuple([targets[row] for row in rows.tolist()])
        tables = _renumbered(tables)
        plan = replace(plan, tables=())
    heads: list[TableHead] = []
    figures: list[NDArray[Any]] = []
    for table in tables:
        part, unit, numbers, names, values, links = contents(table)
        heads.append((part, unit, names, len(numbers), links is not None))
        figures.append(numbers)
        figures.append(values)
        if links is not None:
            figures.append(links)
    if kept:
        joined = _ARRAYS.joined(None, kept)[:-_FIGURE_BYTES] + _ARRAYS.joined(None, figures)
    else:
        joined = _OF_CANDIDATES.joined(candidates, figures)
    return DecisionEntry(
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        choices=request.choices,
        slo=request.slo,
        decided=decided,
        attempt=attempt,
        plan=plan,
        heads=tuple(heads),
        figures=joined,
        targets=targets,
        about=about(targets),
        omitted=omitted,
    )


def _figures(candidates: Candidates) -> list[NDArray[Any]]:
    """Return the columns that are kept: _FACTS, _RATES and _TIERS."""
    rates = candidates.rates
    return [
        *(getattr(candidates, fact) for fact in _FACTS),
        *(getattr(rates, rate) for rate in _RATES),
        candidates.tier_tokens,
    ]


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


def packable(entry: DecisionEntry) -> tuple[object, ...]:
    """Return what is packed of an ended request's decision, as PackedDecision."""
    plan, slo, summary = entry.plan, entry.slo, entry.summary
    return (
        entry.prompt_tokens,
        entry.output_tokens,
        entry.choices,
        None if summary is not None and slo is summary.slo else slo,
        entry.decided,
        entry.attempt,
        plan.prefill,
        plan.decode,
        plan.reason,
        plan.predicted_cached_tokens,
        plan.predicted_ttft_s,
        plan.predicted_tier_tokens,
        entry.figures,
        entry.omitted,
    )


def packed_places(entry: DecisionEntry) -> bytes:
    """Return what most decisions share: their places, what is said about them, and heads of tables."""
    return packed((entry.targets, entry.about, entry.heads))


def unpacked(decision: msgspec.Raw, places: bytes, summary: RequestSummary) -> DecisionEntry:
    """Return the decision of an ended request from what was packed of it."""
    found = decision_of(decision)
    targets, about, heads = places_of(places)
    plan = Plan(
        found.prefill,
        found.decode,
        found.reason,
        found.cached_tokens,
        found.ttft_s,
        predicted_tier_tokens=found.tier_tokens,
    )
    return DecisionEntry(
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
        choices=found.choices,
        slo=found.slo or summary.slo,
        decided=found.decided,
        attempt=found.attempt,
        plan=plan,
        heads=heads,
        figures=found.figures,
        targets=targets,
        about=about,
        omitted=found.omitted,
        summary=summary,
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
