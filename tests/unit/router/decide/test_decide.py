"""Decisions in seconds: the weight of each consideration, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.spec.routing import PolicyName
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role, SloClass
from kvasir.ports.routing import Candidates, Plan, RequestView, RoutingPolicy, RoutingTarget
from kvasir_router.decide import POLICIES as ALL_POLICIES
from kvasir_router.decide import CostPolicy, CostWeights, Disaggregation, make_policy
from kvasir_router.decide.cost import DEFAULT_WEIGHTS, TERMS

POLICIES = ("cost", "round_robin", "least_loaded")
P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH

MakeCandidates = Callable[..., Candidates]
Decide = Callable[..., Plan]
Place = dict[str, Any]


def place(worker_id: str, role: Role = B, rank: int = 0, **known: Any) -> Place:
    return dict(worker_id=worker_id, role=role, rank=rank, **known)


def request(
    prompt: int = 1000, output: int = 10, choices: int = 1, slo: SloClass | None = None
) -> RequestView:
    return RequestView("r", prompt, output, choices, slo=slo or SloClass("s", ttft_s=2.0, itl_s=0.1))


def policy(name: str = "cost", disaggregation: str = "always", seed: int = 0) -> RoutingPolicy:
    return make_policy(name, disaggregation, Random(seed))


@pytest.fixture
def decide(make_candidates: MakeCandidates) -> Decide:
    def run(*places: Place, disaggregation: str = "always", view: RequestView | None = None) -> Plan:
        candidates = make_candidates(*places)
        plan = policy(disaggregation=disaggregation).decide(view or request(), candidates, 0.0)
        assert plan is not None
        return plan

    return run


def terms(plan: Plan, part: str, worker_id: str, places: tuple[Place, ...]) -> Mapping[str, float]:
    (table,) = [table for table in plan.tables if table.part == part]
    ids = [places[row]["worker_id"] for row in table.rows]
    return dict(zip(table.names, table.values[ids.index(worker_id)], strict=True))


# -- where the prompt is computed ------------------------------------------------------------------


def test_a_cached_prefix_draws_the_request(decide: Decide) -> None:
    plan = decide(place("p0", P), place("p1", P, cached_tokens=512), place("d", D))
    assert plan.prefill == RoutingTarget("p1")
    assert plan.predicted_cached_tokens == 512
    assert plan.reason == "disaggregated_prefix"


def test_a_queue_longer_than_the_prefix_is_worth_drives_it_away(decide: Decide) -> None:
    near = place("p0", P, cached_tokens=512, queued_prefill_tokens=2000, waiting=1)
    assert decide(near, place("p1", P), place("d", D)).prefill == RoutingTarget("p1")


def test_waiting_for_a_neighbours_identical_prefix_beats_computing_it_twice(decide: Decide) -> None:
    """The first of many has just been sent: 1,000 tokens queued, all but 20 of which are shared."""
    busy = place("p0", P, cached_tokens=980, queued_prefill_tokens=1000, waiting=1)
    assert decide(busy, place("p1", P), place("d", D)).prefill == RoutingTarget("p0")


def test_a_hot_prefix_is_copied_when_the_wait_for_its_holder_exceeds_recomputing(decide: Decide) -> None:
    others = place("p1", P), place("d", D)
    for queued, holder in ((0, "p0"), (1000, "p0"), (3000, "p1"), (30_000, "p1")):
        hot = place("p0", P, cached_tokens=960, queued_prefill_tokens=queued, waiting=queued // 500)
        assert decide(hot, *others).prefill == RoutingTarget(holder), queued


def test_a_copy_is_made_where_it_displaces_least(decide: Decide) -> None:
    hot = place("p0", P, cached_tokens=960, queued_prefill_tokens=30_000, waiting=30, held_tokens=100_000)
    full, roomy = place("p1", P, held_tokens=95_000), place("p2", P, held_tokens=20_000)
    assert decide(hot, full, roomy, place("d", D)).prefill == RoutingTarget("p2")


def test_slack_in_the_promise_is_spent_on_the_cache(decide: Decide) -> None:
    """2.5 seconds behind others for a prefix worth one: too long for the impatient, little for a batch."""
    places = (
        place("p0", P, cached_tokens=960, queued_prefill_tokens=2500, waiting=2),
        place("p1", P),
        place("d", D),
    )
    impatient = request(slo=SloClass("chat", ttft_s=1.0, itl_s=0.1))
    patient = request(slo=SloClass("batch", ttft_s=60.0, itl_s=0.1))
    assert decide(*places, view=impatient).prefill == RoutingTarget("p1")
    assert decide(*places, view=patient).prefill == RoutingTarget("p0")


def test_a_full_cache_counts_against_a_worker_even_when_nobody_is_busy(decide: Decide) -> None:
    full = place("p0", P, held_tokens=100_000, cached_tokens=16)
    assert decide(full, place("p1", P), place("d", D)).prefill == RoutingTarget("p1")


def test_a_slow_worker_gets_less(decide: Decide) -> None:
    slow = place("p0", P, prefill_token_s=0.01)
    assert decide(slow, place("p1", P), place("d", D)).prefill == RoutingTarget("p1")


def test_a_prefix_in_a_lower_tier_is_fetched_where_that_is_faster_than_computing(decide: Decide) -> None:
    warm = place("p1", P, tier_tokens=(512, 0, 0))
    places = place("p0", P), warm, place("d", D)
    plan = decide(*places)
    assert plan.prefill == RoutingTarget("p1")
    assert terms(plan, "prefill", "p1", places)["load_s"] == pytest.approx(512 * 100 * 1e-9)
    assert terms(plan, "prefill", "p1", places)["prefill_s"] == pytest.approx(0.488)
    assert plan.predicted_cached_tokens == 512
    assert plan.predicted_tier_tokens == (512, 0, 0)


def test_a_plan_says_how_much_is_to_come_from_each_tier(decide: Decide) -> None:
    some = place("p", P, cached_tokens=100, tier_tokens=(200, 0, 300))
    plan = decide(some, place("d", D))
    assert (plan.predicted_cached_tokens, plan.predicted_tier_tokens) == (600, (200, 0, 300))
    slow = {"tier_byte_s": (1e-9, 1e-8, 1e-4)}
    plan = decide(some | slow, place("d", D))
    assert (plan.predicted_cached_tokens, plan.predicted_tier_tokens) == (300, (200, 0, 0))


@pytest.mark.parametrize("name", ["round_robin", "least_loaded"])
def test_policies_that_weigh_no_tiers_have_what_is_there_fetched(
    name: str, make_candidates: MakeCandidates
) -> None:
    known = place("p", cached_tokens=16, tier_tokens=(32, 48, 64))
    plan = policy(name, "never").decide(request(), make_candidates(known), 0.0)
    assert plan is not None
    assert (plan.predicted_cached_tokens, plan.predicted_tier_tokens) == (160, (32, 48, 64))


def test_a_prefix_in_a_tier_slower_than_the_engine_is_computed_again(decide: Decide) -> None:
    slow = place("p1", P, tier_tokens=(512, 0, 0), tier_byte_s=(1e-4, 1e-4, 1e-4))
    places = slow, place("d", D)
    found = terms(decide(*places), "prefill", "p1", places)
    assert found["load_s"] == 0.0
    assert found["prefill_s"] == pytest.approx(1.0)
    assert decide(*places).predicted_cached_tokens == 0


def test_a_slow_tier_is_skipped_and_the_faster_one_above_it_is_used(decide: Decide) -> None:
    places = place("p1", P, tier_tokens=(256, 0, 256), tier_byte_s=(1e-9, 1e-8, 1e-4)), place("d", D)
    found = terms(decide(*places), "prefill", "p1", places)
    assert found["prefill_s"] == pytest.approx(0.744)


def test_prompts_wait_longer_behind_the_same_queue_where_streams_decode(decide: Decide) -> None:
    busy = place("b0", queued_prefill_tokens=4096, waiting=1, streams=20, held_tokens=1)
    places = busy, place("b1", queued_prefill_tokens=4096, waiting=1)
    plan = decide(*places, disaggregation="never")
    assert plan.decode == RoutingTarget("b1")
    alone = terms(plan, "whole", "b1", places)["queue_s"]
    # Two steps of 2,048 tokens, each with one token of every stream: 10 ms and 1 ms a stream.
    assert terms(plan, "whole", "b0", places)["queue_s"] == pytest.approx(alone + 2 * 0.03)


# -- where it is decoded ---------------------------------------------------------------------------


def test_decode_goes_to_the_smaller_batch(decide: Decide) -> None:
    plan = decide(place("p", P), place("d0", D, streams=9), place("d1", D, streams=3))
    assert plan.decode == RoutingTarget("d1")


def test_decode_goes_where_less_has_to_be_moved(decide: Decide) -> None:
    places = place("p", P), place("d0", D), place("d1", D, cached_tokens=900)
    plan = decide(*places)
    assert plan.decode == RoutingTarget("d1")
    assert terms(plan, "decode", "d1", places)["transfer_s"] == pytest.approx(100 * 100.0 * 1e-6)


def test_decode_avoids_a_worker_whose_memory_is_spoken_for(decide: Decide) -> None:
    full = place("d0", D, reserved_kv_tokens=150_000)
    assert decide(place("p", P), full, place("d1", D, streams=1)).decode == RoutingTarget("d1")


def test_a_tight_promise_of_itl_avoids_full_batches_even_far_from_the_prefix(decide: Decide) -> None:
    places = place("b0", cached_tokens=960, streams=10), place("b1", streams=1)
    tight = request(output=100, slo=SloClass("tight", ttft_s=10.0, itl_s=0.02))
    loose = request(output=100, slo=SloClass("loose", ttft_s=2.0, itl_s=60.0))
    assert decide(*places, disaggregation="never", view=tight).decode == RoutingTarget("b1")
    assert decide(*places, disaggregation="never", view=loose).decode == RoutingTarget("b0")


def test_streams_behind_a_long_queue_are_nearer_to_a_broken_promise(decide: Decide) -> None:
    places = place("b0", streams=10, queued_prefill_tokens=500, waiting=1), place("b1", streams=10)
    plan = decide(*places, disaggregation="never", view=request(output=100))
    behind, free = (terms(plan, "whole", worker, places)["stall_s"] for worker in ("b0", "b1"))
    assert behind > 1.05 * free


def test_a_plan_names_the_rank_that_holds_the_prefix(decide: Decide) -> None:
    ranks = [place("p", P, rank, cached_tokens=512 * rank) for rank in (0, 1)]
    assert decide(*ranks, place("d", D)).prefill == RoutingTarget("p", 1)


# -- together or apart -----------------------------------------------------------------------------


def test_auto_runs_a_short_prompt_whole_and_a_long_one_apart_under_load(decide: Decide) -> None:
    fleet = place("p", P), place("d", D, streams=8, kv_token_bytes=10.0, transfer_fixed_s=0.05)
    assert decide(*fleet, disaggregation="auto", view=request(4)).mode == "aggregated"
    assert decide(*fleet, disaggregation="auto", view=request(4000)).mode == "disaggregated"


def test_auto_runs_a_long_prompt_whole_where_it_disturbs_nobody_and_moving_is_dear(decide: Decide) -> None:
    fleet = place("p", P), place("d", D, kv_token_bytes=10_000.0)
    assert decide(*fleet, disaggregation="auto", view=request(4000)).mode == "aggregated"


def test_never_uses_workers_of_role_both_only(decide: Decide) -> None:
    plan = decide(place("d", D), place("b", B, streams=50), disaggregation="never")
    assert (plan.prefill, plan.decode) == (None, RoutingTarget("b"))


def test_always_takes_two_different_workers_even_if_one_would_be_cheaper(decide: Decide) -> None:
    plan = decide(place("b0", B, cached_tokens=999), place("b1", B))
    assert plan.prefill is not None
    assert plan.prefill.worker_id != plan.decode.worker_id


def test_of_a_large_fleet_the_best_of_each_side_are_paired(make_candidates: MakeCandidates) -> None:
    places = [place(f"p{i:02}", P, queued_prefill_tokens=i * 100) for i in reversed(range(40))]
    places += [place(f"d{i:02}", D, streams=i) for i in reversed(range(40))]
    few = CostPolicy(Disaggregation.ALWAYS, Random(0), CostWeights(pairs=16, tie=0.0))
    plan = few.decide(request(), make_candidates(*places), 0.0)
    assert plan is not None
    assert (plan.prefill, plan.decode) == (RoutingTarget("p00"), RoutingTarget("d00"))
    assert [len(table.rows) for table in plan.tables] == [4, 4]


@pytest.mark.parametrize("name", POLICIES)
def test_several_choices_run_whole_where_decoding_is_done(name: str, make_candidates: MakeCandidates) -> None:
    fleet = make_candidates(place("p", P), place("d", D))
    plan = policy(name).decide(request(choices=2), fleet, 0.0)
    assert plan is not None
    assert (plan.prefill, plan.decode) == (None, RoutingTarget("d"))


# -- what is said about it -------------------------------------------------------------------------


def test_the_choice_is_the_row_with_the_smallest_sum_of_its_terms(decide: Decide) -> None:
    places = [
        place(f"b{i}", queued_prefill_tokens=700 * i, cached_tokens=300 * i, streams=i) for i in range(4)
    ]
    plan = decide(*places, disaggregation="never")
    (table,) = plan.tables
    assert (table.part, table.unit) == ("whole", "s")
    assert places[table.rows[table.values.sum(axis=1).argmin()]]["worker_id"] == plan.decode.worker_id


def test_each_part_is_explained_beside_the_chosen_place_of_the_other(decide: Decide) -> None:
    places = [place(f"p{i}", P, queued_prefill_tokens=900 * (3 - i)) for i in range(3)]
    places += [place(f"d{i}", D, streams=20 * i) for i in range(3)]
    plan = decide(*places)
    chosen = [plan.prefill_target.worker_id, plan.decode.worker_id]
    best = [places[t.rows[t.values.sum(axis=1).argmin()]]["worker_id"] for t in plan.tables]
    assert [table.part for table in plan.tables] == ["prefill", "decode"]
    assert best == chosen
    prefill, decode = plan.tables
    used = min(plan.predicted_ttft_s / 2.0, DEFAULT_WEIGHTS.steepest)
    waits = plan.predicted_ttft_s * (DEFAULT_WEIGHTS.within + used)
    for table, worker_id in zip((prefill, decode), chosen, strict=True):
        slo = terms(plan, table.part, worker_id, tuple(places))["slo_s"]
        assert slo == pytest.approx(waits - plan.predicted_ttft_s)
    assert {name for table in plan.tables for name in table.names} == set(TERMS)


def test_the_predicted_ttft_is_queue_prefill_transfer_and_the_first_step(decide: Decide) -> None:
    plan = decide(
        place("p", P, queued_prefill_tokens=500, waiting=1, cached_tokens=400), place("d", D, streams=4)
    )
    assert plan.predicted_ttft_s == pytest.approx(0.5 + 0.6 + 1000 * 100 * 1e-6 + 0.015)


def test_the_predicted_ttft_of_a_whole_request_waits_for_memory_only_beyond_the_queue(decide: Decide) -> None:
    crowded = place("b", reserved_kv_tokens=100_000, streams=9, queued_prefill_tokens=10, waiting=1)
    plan = decide(crowded, disaggregation="never", view=request(output=100))
    waits = 1100 / 100_000 * 100 * 0.02
    shared = 0.001 + 0.019 / 2048
    assert plan.predicted_ttft_s == pytest.approx(max(waits, 10 * shared) + 1000 * shared)


# -- near equals -----------------------------------------------------------------------------------


def test_among_equals_all_get_their_share(make_candidates: MakeCandidates) -> None:
    chooser = policy()
    fleet = make_candidates(*(place(f"p{i}", P) for i in range(4)), place("d", D))
    counts = dict[str, int]()
    for _ in range(400):
        plan = chooser.decide(request(), fleet, 0.0)
        assert plan is not None
        counts[plan.prefill_target.worker_id] = counts.get(plan.prefill_target.worker_id, 0) + 1
    assert len(counts) == 4
    assert min(counts.values()) > 40


def test_of_two_near_equals_drawn_the_cheaper_is_taken(make_candidates: MakeCandidates) -> None:
    chooser = policy()
    fleet = make_candidates(*(place(f"p{i}", P, queued_prefill_tokens=i) for i in range(3)), place("d", D))
    plans = [chooser.decide(request(), fleet, 0.0) for _ in range(300)]
    chosen = [plan.prefill_target.worker_id for plan in plans if plan is not None]
    counts = [chosen.count(f"p{i}") for i in range(3)]
    # Of three, the first wins two draws of three, the second one, and the last none.
    assert counts[2] == 0
    assert 60 < counts[1] < counts[0]


def test_a_difference_larger_than_what_the_request_adds_is_no_tie(make_candidates: MakeCandidates) -> None:
    chooser = policy()
    fleet = make_candidates(place("p0", P), place("p1", P, queued_prefill_tokens=1000), place("d", D))
    plans = [chooser.decide(request(), fleet, 0.0) for _ in range(50)]
    assert {plan.prefill for plan in plans if plan is not None} == {RoutingTarget("p0")}


def test_equal_seeds_decide_equally(make_candidates: MakeCandidates) -> None:
    fleet = make_candidates(*(place(f"b{i}") for i in range(8)))
    one, other = policy(disaggregation="never", seed=3), policy(disaggregation="never", seed=3)
    for _ in range(50):
        assert one.decide(request(), fleet, 0.0) == other.decide(request(), fleet, 0.0)


# -- the classics, and all of them -----------------------------------------------------------------


def test_round_robin_takes_turns(make_candidates: MakeCandidates) -> None:
    chooser = policy("round_robin")
    fleet = make_candidates(*(place(f"p{i}", P) for i in range(3)), place("d", D))
    plans = [chooser.decide(request(), fleet, 0.0) for _ in range(6)]
    chosen = sorted(plan.prefill_target.worker_id for plan in plans if plan)
    assert chosen == ["p0", "p0", "p1", "p1", "p2", "p2"]


def test_least_loaded_ignores_prefixes(make_candidates: MakeCandidates) -> None:
    fleet = make_candidates(
        place("p0", P, cached_tokens=900, queued_prefill_tokens=1), place("p1", P), place("d", D)
    )
    plan = policy("least_loaded").decide(request(), fleet, 0.0)
    assert plan is not None
    assert plan.prefill == RoutingTarget("p1")


def test_every_policy_that_the_spec_names_exists_and_no_other() -> None:
    assert sorted(ALL_POLICIES) == sorted(get_args(PolicyName))


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="cost, round_robin, least_loaded"):
        make_policy("magic", "always", Random(0))


@pytest.mark.parametrize(
    ("roles", "disaggregation", "missing"),
    [
        ((), "always", "no worker that decodes"),
        ((D,), "always", "no worker that prefills"),
        ((P,), "auto", "no worker that decodes"),
        ((B,), "always", "no second worker: prefill and decode are to run apart"),
        ((P, D), "never", "no worker of role both"),
        ((P, D), "always", None),
        ((B, D), "always", None),
        ((D,), "auto", None),
        ((B,), "never", None),
    ],
)
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_missing_is_said_and_nothing_is_planned(
    make_candidates: MakeCandidates,
    name: str,
    roles: tuple[Role, ...],
    disaggregation: str,
    missing: str | None,
) -> None:
    fleet = make_candidates(*(place(f"w{i}", role) for i, role in enumerate(roles)))
    chooser = policy(name, disaggregation)
    said = chooser.missing([r is not D for r in roles], [r is not P for r in roles], range(len(roles)))
    assert said == missing
    assert (chooser.decide(request(), fleet, 0.0) is None) == (missing is not None)


amounts = st.one_of(st.integers(0, 10), st.integers(0, 10**15))
seconds = st.one_of(st.just(0.0), st.floats(1e-12, 1e6))


@given(
    name=st.sampled_from(POLICIES),
    disaggregation=st.sampled_from(["always", "auto", "never"]),
    places=st.lists(
        st.builds(
            place,
            st.sampled_from(["a", "b", "c"]),
            st.just(Role.BOTH),
            st.integers(0, 1),
            cached_tokens=amounts,
            tier_tokens=st.tuples(amounts, amounts, amounts),
            queued_prefill_tokens=amounts,
            waiting=amounts,
            streams=amounts,
            reserved_kv_tokens=amounts,
            held_tokens=amounts,
            kv_tokens=amounts,
            kv_token_bytes=seconds,
            prefill_fixed_s=seconds,
            prefill_token_s=seconds,
            step_fixed_s=seconds,
            step_stream_s=seconds,
            transfer_byte_s=seconds,
            tier_byte_s=st.tuples(seconds, seconds, seconds),
        ),
        max_size=6,
    ),
    roles=st.tuples(*[st.sampled_from(Role)] * 3),
    prompt=st.integers(1, 10**7),
    output=st.integers(0, 10**6),
    choices=st.integers(1, 3),
    promise=st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
    seed=st.integers(0, 9),
)
def test_no_load_makes_a_decision_raise_or_name_a_stranger(
    *,
    make_candidates: MakeCandidates,
    name: str,
    disaggregation: str,
    places: list[Place],
    roles: tuple[Role, ...],
    prompt: int,
    output: int,
    choices: int,
    promise: float,
    seed: int,
) -> None:
    # All ranks of a worker have its role.
    of = dict(zip("abc", roles, strict=True))
    candidates = make_candidates(*(known | {"role": of[known["worker_id"]]} for known in places))
    view = request(prompt, output, choices, SloClass("s", promise, promise))
    plan = policy(name, disaggregation, seed).decide(view, candidates, 0.0)
    if plan is not None:
        assert plan.decode in candidates.targets
        assert plan.prefill is None or plan.prefill in candidates.targets
        assert plan.prefill is None or plan.prefill.worker_id != plan.decode.worker_id
        assert disaggregation != "always" or plan.prefill is not None or choices > 1
        assert all(np.isfinite(table.values).all() for table in plan.tables)
