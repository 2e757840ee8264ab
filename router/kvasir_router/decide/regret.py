"""Regret: what the best alternative would have saved, by the cost model, with hindsight.

When a request has ended, more is known than when it was placed. The cost model (kvasir_router.decide.cost) is
evaluated again for every candidate that the decision record keeps, with what was measured. The regret of a
decision is the cost of the choice minus the lowest cost of any candidate, in seconds as the cost model counts
them: waits weighted by the promised TTFT, and what the request cost others. It is never negative, and 0 if
the choice is still the best.

What is corrected, in this order, and the cause that each step stands for:

    choice    nothing: the policy did not take the lowest predicted cost, since near equals are sampled
    index     the prefix hit of the chosen place, which the engine reports
    compute   seconds per prompt token, as this prompt took, and the rest of the TTFT that no term covers:
              network and event loops. For all candidates, since the same rates were believed of all
    queue     the wait at the chosen place, without the one step that runs there in any case
    transfer  seconds per byte over the link and from tiers, as this request took: for all candidates
    output    the length of the output: for all candidates

Facts of places where the request did not run stay as they were believed: nobody measured them. So the regret
is an estimate, and an error in it that all candidates share cancels out.

The regret after a step minus the regret before it is what the step adds. Some steps subtract, when an error
made the choice look worse than it was. The final regret is divided among the causes that added to it, in
proportion, so that the parts are not negative and their sum is the regret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvasir.ports.routing import FloatColumn, TermTable
from kvasir_router.decide.cost import (
    DECODE_TERMS,
    DEFAULT_WEIGHTS,
    PREFILL_TERMS,
    WHOLE_TERMS,
    CostWeights,
)

CAUSES = ("choice", "index", "compute", "queue", "transfer", "output")

_LEAST_S = 1e-6
"""A smaller regret is 0: sums of floats differ by less than this, and no measurement is as exact."""

_MOST = 8.0
"""Rates are corrected at most by this factor: of a short prompt, most of the time is none of its own."""

_SHORTEST_S = 1e-9


class JudgedPlace(NamedTuple):
    """The place that computed the prompt: its rows in the tables `whole` and `prefill`, None where it is not
    in one. `prefill_fixed_s` is the part of its predicted prefill that does not depend on tokens, `step_s`
    the predicted duration of the step that ran there, 0 if nothing did."""

    whole: int | None
    prefill: int | None
    prefill_fixed_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JudgedDecision:
    """A decision of the cost model. `whole` is its table of places that run both parts, `prefill` and
    `decode` those of the parts; None for what was not considered. `decoded` is the row of the place that
    decoded in `decode`, None if the request ran whole. `workers` names the worker of each row of `prefill`
    and `decode`: a pair is on two. `output_tokens` are expected, of all choices together."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: float
    slo_ttft_s: float
    place: JudgedPlace
    decoded: int | None = None
    whole: TermTable | None = None
    prefill: TermTable | None = None
    decode: TermTable | None = None
    workers: tuple[Sequence[str], Sequence[str]] = ((), ())

    @property
    def parts(self) -> tuple[tuple[TermTable | None, int | None], ...]:
        """The tables of the choice, and its row in each."""
        if self.decoded is None:
            return ((self.whole, self.place.whole),)
        return ((self.prefill, self.place.prefill), (self.decode, self.decoded))


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What was measured. `ttft_s` counts from the decision. `wait_s` is the wait for engines, `compute_s` the
    time in which the prompt was computed, `load_s` the time of loads from tiers, `transfer_s` that of the
    transfer; 0 where it is not reported."""

    ttft_s: float
    cached_tokens: int
    output_tokens: int
    wait_s: float = 0.0
    compute_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Regret:
    """The regret of one decision in seconds, and of that the part of each of CAUSES. `best` is what would
    have cost the least, as rows like JudgedDecision.chosen, and `best_ttft_s` its TTFT, counted from the
    decision."""

    seconds: float
    causes: tuple[float, ...]
    best: tuple[int, ...]
    best_ttft_s: float


class _Steps(NamedTuple):
    """The corrections in force after each step, one row per step: `factors` of the groups of terms (steps x
    _GROUPS), and of the uncached tokens at the place of the choice. `rest_s` is added to every TTFT. From the
    step _QUEUED on, the wait at that place is `wait_s`."""

    factors: FloatColumn
    missing: FloatColumn
    rest_s: FloatColumn
    wait_s: float


class _Costs(NamedTuple):
    """Costs after each step, and TTFTs after the last, of all ways to run a request: of whole places, or of
    pairs. `chosen` are the costs of the choice, None if it is not among them."""

    cost: FloatColumn
    ttft_s: FloatColumn
    chosen: FloatColumn | None


_GROUPS = ("compute", "load", "transfer", "output", "unchanged")
_QUEUED = CAUSES.index("queue")
_KNOWN = frozenset({WHOLE_TERMS, PREFILL_TERMS, DECODE_TERMS})


def _selection(names: tuple[str, ...], **groups: str) -> FloatColumn:
    """Return which group corrects each term (_GROUPS x terms); those that are not in `groups` do not
    count."""
    selected: FloatColumn = np.zeros((len(_GROUPS), len(names)))
    for group, terms in groups.items():
        for term in terms.split():
            selected[_GROUPS.index(group), names.index(f"{term}_s")] = 1.0
    return selected


_WHOLE_WAIT = _selection(WHOLE_TERMS, compute="queue prefill", load="load", output="memory")
_WHOLE_OTHERS = _selection(WHOLE_TERMS, compute="work displace stall", output="decode")
_PREFILL_WAIT = _selection(PREFILL_TERMS, compute="queue prefill", load="load")
_PREFILL_OTHERS = _selection(PREFILL_TERMS, compute="work displace stall")
_DECODE_WAIT = _selection(DECODE_TERMS, transfer="transfer", output="memory", unchanged="step")
_DECODE_OTHERS = _selection(DECODE_TERMS, transfer="link", output="decode")


def judgeable(tables: Sequence[TermTable]) -> bool:
    """Whether these are tables of the cost model."""
    return bool(tables) and all(table.unit == "s" and table.names in _KNOWN for table in tables)


def regret(decision: JudgedDecision, known: Hindsight, weights: CostWeights = DEFAULT_WEIGHTS) -> Regret:
    """Return the regret of a decision whose tables are `judgeable`."""
    steps = _steps(decision, known)
    ways = []
    if decision.whole is not None:
        ways.append(_whole(decision, decision.whole, steps, weights))
    if decision.prefill is not None and decision.decode is not None:
        ways.append(_pairs(decision, decision.prefill, decision.decode, steps, weights))
    chosen = next(each.chosen for each in ways if each.chosen is not None)
    least = np.min([each.cost.reshape(len(CAUSES), -1).min(axis=1) for each in ways], axis=0)
    best, ttft_s = _best(ways)
    after = (chosen - least).tolist()
    final = after[-1]
    added = [_of_note(one - before) for before, one in pairwise((0.0, *after))]
    if final <= _LEAST_S or not any(added):
        return Regret(0.0, (0.0,) * len(CAUSES), best, ttft_s)
    share = final / sum(added)
    return Regret(final, tuple([each * share for each in added]), best, ttft_s)


def _of_note(seconds: float) -> float:
    return seconds if seconds > _LEAST_S else 0.0


def _best(ways: Sequence[_Costs]) -> tuple[tuple[int, ...], float]:
    """Return the rows of what costs the least after the last step, and its TTFT."""
    of_each = []
    for costs in ways:
        last = costs.cost[-1]
        at = int(last.argmin())
        rows = (at,) if last.ndim == 1 else divmod(at, last.shape[1])
        of_each.append((last.item(at), rows, costs.ttft_s.item(at)))
    _, best, ttft_s = min(of_each)
    return best, ttft_s


def _steps(decision: JudgedDecision, known: Hindsight) -> _Steps:
    """Return the corrections after each of CAUSES."""
    believed = _believed(decision)
    prefill_s, load_s, transfer_s = believed["prefill_s"], believed["load_s"], believed.get("transfer_s", 0.0)
    fixed_s = min(decision.place.prefill_fixed_s, prefill_s)
    # Engines compute at least one token.
    predicted = max(1, decision.prompt_tokens - decision.cached_tokens)
    missing = max(1, decision.prompt_tokens - known.cached_tokens) / predicted
    prefill_s = fixed_s + (prefill_s - fixed_s) * missing
    compute = _factor(known.compute_s, prefill_s)
    wait_s = max(0.0, known.wait_s - decision.place.step_s)
    transfer, load = _factor(known.transfer_s, transfer_s), _factor(known.load_s, load_s)
    output = max(1, known.output_tokens) / max(1.0, decision.output_tokens)
    of_terms = wait_s + prefill_s * compute + load_s * load + transfer_s * transfer
    rest_s = known.ttft_s - of_terms - believed.get("step_s", 0.0)
    as_before, measured = (1.0, 1.0, 1.0, 1.0, 1.0), (compute, 1.0, 1.0, 1.0, 1.0)
    moved = (compute, load, transfer, 1.0, 1.0)
    factors = (as_before, as_before, measured, measured, moved, (compute, load, transfer, output, 1.0))
    return _Steps(
        np.array(factors),
        np.array((1.0, *(missing,) * 5)),
        np.array((0.0, 0.0, *(rest_s,) * 4)),
        wait_s,
    )


def _believed(decision: JudgedDecision) -> dict[str, float]:
    """Return the predicted terms of the choice, by name."""
    terms: dict[str, float] = {}
    for table, row in decision.parts:
        if table is None or row is None:
            raise ValueError("the choice has no table")
        terms.update(zip(table.names, table.values[row].tolist(), strict=True))
    return terms


def _factor(measured_s: float, believed_s: float) -> float:
    """Return by how much a rate was off; 1 if nothing was measured, or nothing believed."""
    if measured_s <= 0.0 or believed_s <= 0.0:
        return 1.0
    return min(_MOST, max(1.0 / _MOST, measured_s / believed_s))


def _whole(decision: JudgedDecision, table: TermTable, steps: _Steps, weights: CostWeights) -> _Costs:
    values, row = table.values.T, decision.place.whole
    wait = steps.factors @ _WHOLE_WAIT @ values
    others = steps.factors @ _WHOLE_OTHERS @ values
    if row is not None:
        terms = dict(zip(table.names, table.values[row].tolist(), strict=True))
        _correct(decision.place, row, terms, steps, (wait, others))
        wait[_QUEUED:, row] -= terms["memory_s"] * steps.factors[_QUEUED:, _GROUPS.index("output")]
    wait += steps.rest_s[:, None]
    cost = _weighted(wait, decision, weights)
    cost += others
    ours = row is not None and decision.decoded is None
    return _Costs(cost, wait[-1], cost[:, row] if ours else None)


def _pairs(
    decision: JudgedDecision, prefill: TermTable, decode: TermTable, steps: _Steps, weights: CostWeights
) -> _Costs:
    values, row, decoded = prefill.values.T, decision.place.prefill, decision.decoded
    before = steps.factors @ _PREFILL_WAIT @ values
    others = steps.factors @ _PREFILL_OTHERS @ values
    if row is not None:
        terms = dict(zip(prefill.names, prefill.values[row].tolist(), strict=True))
        _correct(decision.place, row, terms, steps, (before, others))
    values = decode.values.T
    after = steps.factors @ _DECODE_WAIT @ values
    if row is not None and decoded is not None:
        # The measured wait includes that for KV to become free on the decode worker, which others that would
        # compute the prompt for it wait for too.
        memory_s = decode.values.item(decoded, DECODE_TERMS.index("memory_s"))
        believed_s = memory_s * steps.factors[_QUEUED:, _GROUPS.index("output")]
        waited_s = np.minimum(believed_s, steps.wait_s)
        before[_QUEUED:, row] -= waited_s
        after[_QUEUED:, decoded] += waited_s - believed_s
    after += steps.rest_s[:, None]
    wait = before[:, :, None] + after[:, None, :]
    cost = _weighted(wait, decision, weights)
    cost += others[:, :, None]
    cost += (steps.factors @ _DECODE_OTHERS @ values)[:, None, :]
    prefills, decodes = decision.workers
    if not set(prefills).isdisjoint(decodes):
        cost[:, np.array([[one == other for other in decodes] for one in prefills])] = np.inf
    ours = row is not None and decoded is not None
    return _Costs(cost, wait[-1], cost[:, row, decoded] if ours else None)


def _correct(
    place: JudgedPlace,
    row: int,
    terms: dict[str, float],
    steps: _Steps,
    sums: tuple[FloatColumn, FloatColumn],
) -> None:
    """Correct what depends on the uncached tokens of the place that computed the prompt, and its queue, in
    the waits and the costs to others (steps x rows)."""
    wait, others = sums
    compute = steps.factors[:, 0]
    prefill_s = terms["prefill_s"]
    fixed_s = min(place.prefill_fixed_s, prefill_s)
    more_s = (prefill_s - fixed_s) * (steps.missing - 1.0) * compute
    wait[:, row] += more_s
    engine_s = terms["work_s"] + terms["displace_s"]
    others[:, row] += more_s * (engine_s / max(prefill_s, _SHORTEST_S))
    others[:, row] += terms["stall_s"] * (steps.missing - 1.0) * compute
    wait[_QUEUED:, row] += steps.wait_s - terms["queue_s"] * compute[_QUEUED:]


def _weighted(wait: FloatColumn, decision: JudgedDecision, weights: CostWeights) -> FloatColumn:
    """Return these waits as the promise weights them; `wait` becomes at least 0."""
    np.maximum(wait, 0.0, out=wait)
    used: FloatColumn = wait * (1.0 / max(decision.slo_ttft_s, _SHORTEST_S))
    np.minimum(used, weights.steepest, out=used)
    used += weights.within
    used *= wait
    return used
