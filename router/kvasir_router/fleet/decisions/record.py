"""What `kvasir explain` shows of a decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvasir.core.locality import LinkClass
from kvasir.ports.router import CandidateRecord, DecisionRecord, PhaseRecord
from kvasir.ports.routing import FloatColumn, RoutingTarget, TermTable
from kvasir.telemetry.reasons import OK
from kvasir_router.decide.regret import CAUSES, Regret
from kvasir_router.fleet.decisions.entry import FACTS, TIERS, DecisionEntry, chosen_target, table_costs


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
        facts=dict(zip((*FACTS, *TIERS), map(float, facts), strict=True)),
        terms=dict(zip(table.names, map(float, values), strict=True)),
        total=float(values.sum()),
        chosen=target == chosen,
    )
