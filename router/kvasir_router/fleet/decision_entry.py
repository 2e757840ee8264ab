"""One decision as it is kept: its arrays, trimmed to the best places, and what they become on request.

Few of many decisions are ever looked up, so a decision is converted to a record only then. Once its request
has ended, it is kept as bytes (kvasir.ports.views.packed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import msgspec
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


@dataclass(slots=True, eq=False)
class DecisionEntry:
    """One decision. The rows of its tables are places in `targets`; `omitted` rows of the policy's were left
    out. For the same places, `about` has the pool and the KV state, `facts` a row for each of _FACTS, `rates`
    a row for each of _RATES, and `tiers` a column for each of _TIERS. `output_tokens` are those
    expected of each choice. `regret` and `better`, the places that would have cost less, are set by judging.

    The figures are kept as bytes: made and freed with each request, an array takes eight times as long."""

    prompt_tokens: int
    output_tokens: int
    choices: int
    slo: SloClass
    decided: Decided
    attempt: int
    plan: Plan
    tables: tuple[TermTable, ...]
    figures: bytes
    targets: tuple[RoutingTarget, ...]
    about: tuple[tuple[str, str], ...]
    omitted: int
    summary: RequestSummary | None = None
    judged: bool = False
    regret: Regret | None = None
    better: tuple[str, ...] = ()

    @property
    def facts(self) -> IntColumn:
        """_FACTS x places."""
        places = len(self.targets)
        facts = np.frombuffer(self.figures, dtype=np.int64, count=len(_FACTS) * places)
        return facts.reshape(len(_FACTS), places)

    @property
    def rates(self) -> FloatColumn:
        """_RATES x places."""
        places = len(self.targets)
        before = len(_FACTS) * places * _FIGURE_BYTES
        rates = np.frombuffer(self.figures, np.float64, len(_RATES) * places, before)
        return rates.reshape(len(_RATES), places)

    @property
    def tiers(self) -> IntColumn:
        """Places x _TIERS."""
        before = (len(_FACTS) + len(_RATES)) * len(self.targets) * _FIGURE_BYTES
        return np.frombuffer(self.figures, np.int64, -1, before).reshape(-1, len(_TIERS))

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
    if len(targets) <= PLACES:
        figures = b"".join(_FIGURES_OF(candidates))
    else:
        # The kept arrays must not grow with the fleet.
        omitted = sum([max(0, len(table.rows) - PLACES) for table in tables])
        tables = tuple([_trimmed(table, candidates, plan) for table in tables])
        rows = np.concatenate([table.rows for table in tables])
        figures = b"".join([each.take(rows, 0).tobytes() for each in _FIGURES_OF(candidates)])
        targets = tuple([targets[row] for row in rows.tolist()])
        tables = _renumbered(tables)
        plan = replace(plan, tables=())
    return DecisionEntry(
        request.prompt_tokens,
        request.output_tokens,
        request.choices,
        request.slo,
        decided,
        attempt,
        plan,
        tables,
        figures,
        targets,
        about(targets),
        omitted,
    )


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
    """Return what is packed of an ended request's decision, as _PackedDecision. Its places are packed apart,
    because most decisions share them."""
    plan, slo, decided, summary = entry.plan, entry.slo, entry.decided, entry.summary
    return (
        entry.prompt_tokens,
        entry.output_tokens,
        entry.choices,
        None if summary is not None and slo is summary.slo else slo,
        decided,
        entry.attempt,
        plan.prefill,
        plan.decode,
        plan.reason,
        plan.predicted_cached_tokens,
        plan.predicted_ttft_s,
        plan.predicted_tier_tokens,
        entry.figures,
        entry.omitted,
        [_packable(table) for table in entry.tables],
    )


def _packable(table: TermTable) -> tuple[object, ...]:
    values, links = table.values, table.links
    by_column = values.flags.f_contiguous
    return (
        table.part,
        table.unit,
        table.names,
        table.rows.tobytes(),
        values.tobytes("F" if by_column else "C"),
        by_column,
        None if links is None else links.tobytes(),
    )


class _PackedTable(NamedTuple):
    """A TermTable. `by_column`: its values are in the order of columns, as sums over them depend on it."""

    part: str
    unit: str
    names: tuple[str, ...]
    rows: bytes
    values: bytes
    by_column: bool
    links: bytes | None

    def table(self) -> TermTable:
        rows = np.frombuffer(self.rows, np.int64)
        shape = len(rows), len(self.names)
        values = np.frombuffer(self.values).reshape(shape, order="F" if self.by_column else "C")
        links = None if self.links is None else np.frombuffer(self.links, np.uint8)
        return TermTable(self.part, self.unit, rows, self.names, values, links)


class _PackedDecision(NamedTuple):
    """A decision without its places and its outcome. `slo` is None if it is that of the outcome."""

    prompt_tokens: int
    output_tokens: int
    choices: int
    slo: SloClass | None
    decided: Decided
    attempt: int
    prefill: RoutingTarget | None
    decode: RoutingTarget
    reason: str
    cached_tokens: int
    ttft_s: float
    tier_tokens: tuple[int, ...]
    figures: bytes
    omitted: int
    tables: tuple[_PackedTable, ...]


_DECISIONS = msgspec.msgpack.Decoder(_PackedDecision)
_PLACES = msgspec.msgpack.Decoder(tuple[tuple[RoutingTarget, ...], tuple[tuple[str, str], ...]])


def unpacked(decision: msgspec.Raw, places: bytes, summary: RequestSummary) -> DecisionEntry:
    """Return the decision of an ended request, whose packed `places` are its targets and what is said about
    them."""
    found = _DECISIONS.decode(decision)
    targets, about = _PLACES.decode(places)
    plan = Plan(
        found.prefill,
        found.decode,
        found.reason,
        found.cached_tokens,
        found.ttft_s,
        predicted_tier_tokens=found.tier_tokens,
    )
    tables = tuple([each.table() for each in found.tables])
    entry = DecisionEntry(
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
        choices=found.choices,
        slo=found.slo or summary.slo,
        decided=found.decided,
        attempt=found.attempt,
        plan=plan,
        tables=tables,
        figures=found.figures,
        targets=targets,
        about=about,
        omitted=found.omitted,
    )
    entry.summary = summary
    return entry


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
