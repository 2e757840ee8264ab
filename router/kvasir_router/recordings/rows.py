"""What a recording has to say of one request: a row of JSON values, without any content."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir.core.requests import Request, Task
from kvasir.ports.recordings import RecordingQuery
from kvasir.ports.router import RequestSummary
from kvasir.ports.routing import TermTable
from kvasir.telemetry.reasons import OK, REASONS
from kvasir_router.decide.regret import CAUSES
from kvasir_router.fleet.decision_entry import DecisionEntry, chosen_target, table_costs
from kvasir_router.fleet.judgement import kept_regret
from kvasir_router.recordings.salting import Salt

PLACES = 3
"""Candidates of each part of a decision that are recorded: the best ones, and the chosen one."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended. `names` are its whole blocks, of `block_size` tokens each; the tokens are not
    kept. `expected_tokens` is the output that was expected of it."""

    arrival_s: float
    prompt_tokens: int
    expected_tokens: int
    names: array[int]
    block_size: int
    tenant: str
    session: str
    embeds: bool
    summary: RequestSummary
    decision: DecisionEntry | None

    @classmethod
    def of(
        cls,
        request: Request,
        summary: RequestSummary,
        decision: DecisionEntry | None,
        *,
        names: array[int],
        block_size: int,
        expected_tokens: int,
    ) -> EndedRequest:
        """Keep of a request what is recorded."""
        return cls(
            request.arrival_s,
            len(request.tokens),
            expected_tokens,
            names,
            block_size,
            request.tenant,
            request.session,
            request.task is Task.EMBED,
            summary,
            decision,
        )

    def named(self, block_tokens: int) -> array[int]:
        """Return the names of blocks of this many tokens. As the name of a block stands for all before it,
        that of a larger one is the last of those it holds. None if these blocks do not fit into each
        other."""
        if not self.block_size or block_tokens % self.block_size:
            return self.names[:0]
        step = block_tokens // self.block_size
        return self.names if step == 1 else self.names[step - 1 :: step]


def rows_of(
    ended: list[EndedRequest], query: RecordingQuery, block_tokens: int, opened_s: float, policy: str
) -> list[dict[str, Any]]:
    """Return the rows of some requests."""
    salt = Salt(query.salt)
    names, ends = array("Q"), []
    for each in ended:
        if query.prefixes:
            names.extend(each.named(block_tokens))
        ends.append(len(names))
    salted = salt.blocks(names)
    rows = []
    for each, begin, end in zip(ended, [0, *ends], ends, strict=False):
        row = _request(each, query, salt, opened_s)
        if query.prefixes:
            row["prefix_hashes"] = salted[begin:end]
        if query.ids:
            row["request_id"] = each.summary.request_id
        row["outcome"] = _outcome(each.summary)
        if query.decisions and each.decision is not None:
            row["decision"] = _decision(each.decision, policy)
        rows.append(row)
    return rows


def _request(each: EndedRequest, query: RecordingQuery, salt: Salt, opened_s: float) -> dict[str, Any]:
    summary = each.summary
    # What was cut off would have gone on: a replay takes what was expected.
    output = summary.usage.output_tokens if summary.outcome == OK else each.expected_tokens
    row: dict[str, Any] = {
        "arrival_s": round(each.arrival_s - opened_s, 6),
        "prompt_tokens": each.prompt_tokens,
        "output_tokens": 0 if each.embeds else output,
        "model": summary.model,
        "slo": summary.slo.name,
    }
    for kind, name in (("tenant", each.tenant), ("session", each.session)):
        if name:
            row[kind] = name if query.names else salt.label(kind, name)
    if each.embeds:
        row["embeds"] = True
    return row


def _outcome(summary: RequestSummary) -> dict[str, Any]:
    usage, reason = summary.usage, REASONS.get(summary.outcome)
    return {
        "code": summary.outcome,
        "status": 200 if summary.outcome == OK else 0 if reason is None else reason.status,
        "finish": summary.finish or None,
        "slo_met": summary.slo_met,
        "queued_s": _seconds(None if summary.routed_s is None else summary.routed_s - summary.arrival_s),
        "ttft_s": _seconds(summary.ttft_s),
        "itl_s": _seconds(summary.itl_s),
        "e2e_s": _seconds(summary.finished_s - summary.arrival_s),
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "tier_tokens": usage.tier_tokens,
        "transferred_tokens": usage.transferred_tokens,
        "waited_s": _seconds(summary.waited_s),
        "computed_s": _seconds(summary.computed_s),
        "transfer_s": _seconds(summary.pulled_s),
        "retries": summary.retries,
        "migrations": summary.migrations,
    }


def _decision(entry: DecisionEntry, policy: str) -> dict[str, Any]:
    plan, regret = entry.plan, kept_regret(entry)
    return {
        "policy": policy,
        "mode": plan.mode,
        "reason": plan.reason,
        "decided_in_s": round(entry.decided.took_s, 9),
        "prefill": None if plan.prefill is None else plan.prefill.worker_id,
        "decode": plan.decode.worker_id,
        "predicted_ttft_s": _seconds(plan.predicted_ttft_s),
        "predicted_cached_tokens": plan.predicted_cached_tokens,
        "expected_output_tokens": entry.output_tokens,
        "parts": {table.part: _part(entry, table) for table in entry.tables},
        "regret_s": None if regret is None else _seconds(regret.seconds),
        "regret_causes": {}
        if regret is None
        else {cause: _seconds(part) for cause, part in zip(CAUSES, regret.causes, strict=True) if part},
        "better": list(entry.better),
    }


def _part(entry: DecisionEntry, table: TermTable) -> dict[str, Any]:
    """Return the best candidates of a part and the chosen one, with the terms that are not 0."""
    costs = table_costs(table)
    target = chosen_target(table.part, entry.plan)
    targets = [entry.targets[row] for row in table.rows.tolist()]
    best = np.argsort(costs, kind="stable")[:PLACES].tolist()
    chosen = targets.index(target) if target in targets else None
    if chosen is not None and chosen not in best:
        best[-1] = chosen
    return {
        "considered": len(targets),
        "unit": table.unit,
        "places": [
            {
                "worker": targets[at].worker_id,
                "rank": targets[at].rank,
                "chosen": at == chosen,
                "total": round(float(table.values[at].sum()), 6),
                "terms": {
                    name: round(value, 6)
                    for name, value in zip(table.names, table.values[at].tolist(), strict=True)
                    if value
                },
            }
            for at in best
        ],
    }


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
