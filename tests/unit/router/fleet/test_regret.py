"""Regret: what the best alternative would have saved, with hindsight, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import Role, SloClass, Usage
from kvasir.ports.router import RequestSummary
from kvasir.ports.routing import Candidates, Plan, RequestView, RoutingTarget
from kvasir_router.decide import CostPolicy, CostWeights, Disaggregation, make_policy
from kvasir_router.decide.packing import Decided
from kvasir_router.decide.regret import CAUSES, Regret
from kvasir_router.fleet.decision_entry import DecisionEntry, entry_of
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.judgement import (
    JUDGED_PER_S,
    JudgementBudget,
    RegretTotals,
    judge,
    places_of,
)

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
MakeCandidates = Callable[..., Candidates]
Place = dict[str, Any]
NEVER, AUTO, ALWAYS = Disaggregation.NEVER, Disaggregation.AUTO, Disaggregation.ALWAYS
STRICT = replace(CostWeights(), tie=0.0)
"""Nothing is sampled: the lowest cost is chosen."""


def place(worker_id: str, role: Role = B, **known: Any) -> Place:
    return dict(worker_id=worker_id, role=role, rank=0, **known)


def request(prompt: int = 1000, output: int = 10, ttft_s: float = 2.0) -> RequestView:
    return RequestView("r", prompt, output, 1, slo=SloClass("s", ttft_s=ttft_s, itl_s=0.1))


def exact(targets: Sequence[RoutingTarget]) -> tuple[tuple[str, str], ...]:
    return (("pool", "exact"),) * len(targets)


def decided(view: RequestView, candidates: Candidates, plan: Plan) -> DecisionEntry:
    at = Decided(arrival_s=0.0, now_s=1.0, took_s=0.0)
    return entry_of(view, candidates, plan, decided=at, attempt=1, about=exact)


def chosen_terms(entry: DecisionEntry) -> dict[str, float]:
    """The predicted terms of the choice."""
    plan, found = entry.plan, dict[str, float]()
    for table in entry.tables:
        target = plan.prefill if table.part == "prefill" else plan.decode
        if (table.part == "whole") == (plan.prefill is None):
            row = [entry.targets[row] for row in table.rows.tolist()].index(target or plan.decode)
            found.update(zip(table.names, table.values[row].tolist(), strict=True))
    return found


def as_predicted(entry: DecisionEntry, **other: Any) -> RequestSummary:
    """The end of a request for which every prediction was right, but for `other`."""
    terms, plan = chosen_terms(entry), entry.plan
    computing = entry.targets.index(plan.prefill_target)
    streams = entry.streams(computing)
    step_s = entry.rates[1, computing] + entry.rates[2, computing] * streams if streams else 0.0
    usage = Usage(entry.prompt_tokens, plan.predicted_cached_tokens, output_tokens=entry.output_tokens)
    summary = RequestSummary(
        "r",
        "m",
        "ok",
        arrival_s=0.0,
        finished_s=99.0,
        routed_s=1.0,
        first_token_s=1.0 + plan.predicted_ttft_s,
        usage=usage,
        waited_s=terms["queue_s"] + terms["memory_s"] + float(step_s),
        computed_s=terms["prefill_s"],
        pulled_s=terms.get("transfer_s", 0.0),
        tier_s=terms["load_s"],
    )
    return replace(summary, **other)


Decide = Callable[..., DecisionEntry]


@pytest.fixture
def decide(make_candidates: MakeCandidates) -> Decide:
    def run(*places: Place, mode: Disaggregation = NEVER, view: RequestView | None = None) -> DecisionEntry:
        view, candidates = view or request(), make_candidates(*places)
        plan = CostPolicy(mode, Random(0), STRICT).decide(view, candidates, 0.0)
        assert plan is not None
        return decided(view, candidates, plan)

    return run


def judged(entry: DecisionEntry, summary: RequestSummary) -> Regret:
    found = judge(entry, summary)
    assert found is not None
    return found


def by_cause(found: Regret) -> dict[str, float]:
    return {cause: part for cause, part in zip(CAUSES, found.causes, strict=True) if part}


# -- each cause ------------------------------------------------------------------------------------


def test_the_lowest_cost_has_no_regret_if_all_came_as_predicted(decide: Decide) -> None:
    for places in (
        (place("a", cached_tokens=512), place("b", streams=3)),
        (place("p0", P, cached_tokens=512), place("p1", P), place("d0", D, streams=2), place("d1", D)),
        (place("p", P), place("d", D), place("b", streams=1, queued_prefill_tokens=900, waiting=1)),
    ):
        entry = decide(*places, mode=AUTO)
        assert judged(entry, as_predicted(entry)).seconds == 0.0


def test_a_choice_that_was_not_the_lowest_cost_is_regretted_by_the_difference(
    decide: Decide, make_candidates: MakeCandidates
) -> None:
    places = place("a", cached_tokens=100), place("b")
    best = decide(*places)
    (table,) = best.plan.tables
    other = replace(best.plan, decode=RoutingTarget("b"), predicted_cached_tokens=0, predicted_ttft_s=1.0)
    entry = decided(request(), make_candidates(*places), other)
    found = judged(entry, as_predicted(entry))
    a, b = table.values.sum(axis=1).tolist()
    assert found.seconds == pytest.approx(b - a)
    assert by_cause(found) == {"choice": pytest.approx(b - a)}
    assert places_of(entry, found) == ("whole a",)
    assert found.best_ttft_s == pytest.approx(0.9)


def test_a_prefix_that_was_gone_is_laid_to_the_index(decide: Decide) -> None:
    """The holder waited for its 800 tokens, in vain: 1,000 tokens without a queue would have cost less."""
    entry = decide(place("a", cached_tokens=800, queued_prefill_tokens=300, waiting=1), place("b"))
    assert entry.plan.decode == RoutingTarget("a")
    lost = Usage(1000, 0, output_tokens=10)
    late = as_predicted(entry, usage=lost, computed_s=1.0, first_token_s=1.0 + 0.3 + 1.0)
    found = judged(entry, late)
    assert set(by_cause(found)) == {"index"}
    assert found.best == (1,)


def test_a_queue_that_was_longer_is_laid_to_its_estimate(decide: Decide) -> None:
    entry = decide(place("a", cached_tokens=200), place("b"))
    late = as_predicted(entry, waited_s=1.5, first_token_s=1.0 + 1.5 + 0.8)
    found = judged(entry, late)
    assert set(by_cause(found)) == {"queue"}
    assert places_of(entry, found) == ("whole b",)
    assert found.best_ttft_s == pytest.approx(1.0)


def test_the_step_that_runs_anyway_is_no_queue(decide: Decide) -> None:
    entry = decide(place("a", streams=4), place("b", streams=4))
    assert judged(entry, as_predicted(entry)).seconds == 0.0
    assert judged(entry, as_predicted(entry, waited_s=0.0)).seconds == 0.0


def test_a_prompt_that_took_longer_everywhere_changes_nothing(decide: Decide) -> None:
    entry = decide(place("a"), place("b"))
    slow = as_predicted(entry, computed_s=3.0, first_token_s=1.0 + 3.0)
    assert judged(entry, slow).seconds == 0.0


def test_rates_that_were_too_fast_are_laid_to_compute_where_another_place_computes_less(
    decide: Decide,
) -> None:
    """A prefix was given up for a batch with fewer streams, and the prompt took four times as long."""
    entry = decide(place("a", cached_tokens=990, streams=10), place("b"), view=request(output=150))
    assert entry.plan.decode == RoutingTarget("b")
    late = as_predicted(entry, computed_s=4.0, first_token_s=1.0 + 4.0)
    assert set(by_cause(judged(entry, late))) == {"compute"}


def test_a_transfer_that_took_longer_shows_that_the_prompt_should_have_stayed(decide: Decide) -> None:
    entry = decide(place("p", P), place("d", D, streams=1), mode=AUTO)
    assert entry.plan.prefill == RoutingTarget("p")
    predicted = chosen_terms(entry)["transfer_s"]
    ttft = 1.0 + entry.plan.predicted_ttft_s + 7 * predicted
    found = judged(entry, as_predicted(entry, pulled_s=8 * predicted, first_token_s=ttft))
    assert found.causes[CAUSES.index("transfer")] == pytest.approx(found.seconds)
    assert places_of(entry, found) == ("whole d",)


def test_a_longer_output_is_laid_to_its_estimate(decide: Decide) -> None:
    """The emptier batch was worth less than the prefix, for ten tokens."""
    entry = decide(place("a", cached_tokens=900, streams=1), place("b"))
    assert entry.plan.decode == RoutingTarget("a")
    usage = Usage(1000, 900, output_tokens=5000)
    found = judged(entry, as_predicted(entry, usage=usage))
    assert set(by_cause(found)) == {"output"}
    assert found.best == (1,)


def test_a_pair_on_one_worker_is_no_alternative(decide: Decide) -> None:
    entry = decide(place("a", cached_tokens=900), place("b"), mode=ALWAYS)
    assert entry.plan.prefill is not None
    found = judged(entry, as_predicted(entry, waited_s=30.0, first_token_s=40.0))
    assert places_of(entry, found) == ("prefill b", "decode a")


# -- what holds for all ----------------------------------------------------------------------------

tokens = st.integers(0, 4000)
times = st.one_of(st.just(0.0), st.floats(1e-4, 20.0))
fleets = st.lists(
    st.builds(
        lambda role, known: (role, known),
        st.sampled_from(Role),
        st.fixed_dictionaries(
            {
                "cached_tokens": st.integers(0, 850),
                "queued_prefill_tokens": tokens,
                "waiting": st.integers(0, 5),
                "streams": st.integers(0, 50),
                "held_tokens": st.integers(0, 120_000),
                "reserved_kv_tokens": st.integers(0, 120_000),
                "tier_tokens": st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)),
                "prefill_fixed_s": times,
            }
        ),
    ),
    min_size=1,
    max_size=20,
)


@given(
    fleet=fleets,
    cached=st.integers(0, 1000),
    output=st.integers(1, 5000),
    measured=st.tuples(times, times, times, times, times),
    mode=st.sampled_from(["always", "auto", "never"]),
    seed=st.integers(0, 9),
)
def test_regret_is_never_negative_and_its_causes_add_up(
    *,
    make_candidates: MakeCandidates,
    fleet: list[tuple[Role, Place]],
    cached: int,
    output: int,
    measured: tuple[float, float, float, float, float],
    mode: str,
    seed: int,
) -> None:
    candidates = make_candidates(*[place(f"w{i}", role, **known) for i, (role, known) in enumerate(fleet)])
    view = request(prompt=1001)
    plan = make_policy("cost", mode, Random(seed)).decide(view, candidates, 0.0)
    if plan is None:
        return
    entry = decided(view, candidates, plan)
    ttft_s, waited_s, computed_s, pulled_s, tier_s = measured
    summary = as_predicted(entry)
    usage = Usage(1001, cached, output_tokens=output)
    found = judged(
        entry,
        replace(
            summary,
            usage=usage,
            first_token_s=1.0 + ttft_s,
            waited_s=waited_s,
            computed_s=computed_s,
            pulled_s=pulled_s,
            tier_s=tier_s,
        ),
    )
    assert found.seconds >= 0.0
    assert all(part >= 0.0 for part in found.causes)
    assert sum(found.causes) == pytest.approx(found.seconds)
    # What came as it was predicted, at the lowest cost, is not regretted, whatever the fleet.
    strict = CostPolicy(Disaggregation(mode), Random(seed), STRICT).decide(view, candidates, 0.0)
    assert strict is not None
    best = decided(view, candidates, strict)
    assert judged(best, as_predicted(best)).seconds == 0.0


def test_a_wait_for_memory_of_the_decode_worker_is_the_same_for_all_that_would_compute_the_prompt(
    decide: Decide,
) -> None:
    full = place("d", D, streams=20, reserved_kv_tokens=120_000)
    entry = decide(place("p0", P), place("p1", P, queued_prefill_tokens=1, waiting=1), full, mode=ALWAYS)
    assert chosen_terms(entry)["memory_s"] > 0.0
    assert judged(entry, as_predicted(entry)).seconds == 0.0


def test_a_longer_wait_is_never_regretted_less(decide: Decide) -> None:
    entry = decide(place("a", cached_tokens=200), place("b", streams=2))
    found = [
        judged(entry, as_predicted(entry, waited_s=wait, first_token_s=1.0 + wait + 0.8)).seconds
        for wait in (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0)
    ]
    assert found == sorted(found)
    assert found[0] == 0.0 < found[-1]


# -- what is judged --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"outcome": "client_closed"},
        {"outcome": "worker_lost"},
        {"first_token_s": None},
        {"routed_s": 0.5},
        {"retries": 1},
        {"migrations": 1},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_request_that_did_not_run_as_placed_is_not_judged(decide: Decide, other: dict[str, Any]) -> None:
    entry = decide(place("a"), place("b"))
    assert judge(entry, as_predicted(entry, **other)) is None


def test_other_policies_have_no_costs_to_judge_by(make_candidates: MakeCandidates) -> None:
    candidates = make_candidates(place("a"), place("b"))
    summary = as_predicted(decided(request(), candidates, cost_plan(candidates)))
    for name in ("round_robin", "dynamo", "mooncake"):
        plan = make_policy(name, "never", Random(0)).decide(request(), candidates, 0.0)
        assert plan is not None
        assert judge(decided(request(), candidates, plan), summary) is None


def cost_plan(candidates: Candidates) -> Plan:
    plan = make_policy("cost", "never", Random(0)).decide(request(), candidates, 0.0)
    assert plan is not None
    return plan


def test_totals_are_sums_by_cause() -> None:
    totals = RegretTotals()
    causes = tuple(float(number) for number in range(len(CAUSES)))
    for found in (Regret(15.0, causes, (0,), 0.1), Regret(0.0, (0.0,) * len(CAUSES), (0,), 0.1)) * 2:
        totals.add(found)
    view = totals.view()
    assert (view.judged, view.regretted, view.seconds) == (4, 2, 30.0)
    assert view.causes == {cause: 2.0 * number for number, cause in enumerate(CAUSES)}


def test_a_busy_router_judges_a_bounded_number_of_decisions_a_second() -> None:
    budget = JudgementBudget()
    for second in (0, 1, 2):
        taken = sum(budget.take(1000.0 + second + each / 1000) for each in range(1000))
        assert taken <= 2 * JUDGED_PER_S
        assert second == 0 or taken == pytest.approx(JUDGED_PER_S, abs=1)
    assert sum(budget.take(1003.0 + each / 5) for each in range(100)) == 100


def test_a_busy_router_judges_several_decisions_one_after_the_other() -> None:
    budget = JudgementBudget()
    judged = [number for number in range(10_000) if budget.take(1000.0 + number / 1000)]
    alone = [number for number in judged if number - 1 not in judged and number + 1 not in judged]
    assert len(judged) == pytest.approx(10 * JUDGED_PER_S, abs=JUDGED_PER_S)
    assert alone == []


def test_a_decision_beyond_the_budget_is_judged_when_its_record_is_asked_for(
    make_candidates: MakeCandidates,
) -> None:
    log = DecisionLog(1000, policy="cost", stopwatch=lambda: 0.0, on_decision=lambda _: None)
    at, candidates = Decided(arrival_s=0.0, now_s=1.0, took_s=0.0), make_candidates(place("a"), place("b"))
    for number in range(100):
        view = replace(request(), request_id=str(number))
        plan = CostPolicy(NEVER, Random(0), STRICT).decide(view, candidates, 0.0)
        assert plan is not None
        log.decided(view, candidates, plan, at, exact)
        entry = decided(view, candidates, plan)
        log.ended(as_predicted(entry, request_id=str(number)))
    assert log.regret().judged == JUDGED_PER_S
    last = log.explain("99")
    assert last is not None
    assert last.regret_s == 0.0
    assert log.regret().judged == JUDGED_PER_S
