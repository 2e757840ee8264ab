"""Decisions in seconds: what each consideration is worth, one at a time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role, Timings, Usage
from kvasir.ports.routing import Candidate, Plan, Rates, RequestView, RoutingPolicy, Target
from kvasir_router.decide import RateBook, make_policy
from kvasir_router.decide.rates import LinearFit

POLICIES = ("cost", "round_robin", "least_loaded")
RATES = Rates(
    prefill_fixed_s=0.0,
    prefill_token_s=0.001,
    step_fixed_s=0.01,
    step_stream_s=0.001,
    transfer_fixed_s=0.0,
    transfer_byte_s=1e-6,
)


def candidate(worker_id: str, role: Role = Role.BOTH, rank: int = 0, **known: Any) -> Candidate:
    known = dict[str, Any](rates=RATES, kv_tokens=100_000, kv_token_bytes=100.0) | known
    return Candidate(target=Target(worker_id, rank), pool=role.value, role=role, **known)


def request(prompt: int = 1000, output: int = 10, choices: int = 1) -> RequestView:
    return RequestView("r", prompt, output, choices)


def policy(name: str = "cost", disaggregation: str = "always", seed: int = 0) -> RoutingPolicy:
    return make_policy(name, disaggregation, Random(seed))


def decide(*candidates: Candidate, disaggregation: str = "always", view: RequestView | None = None) -> Plan:
    plan = policy(disaggregation=disaggregation).decide(view or request(), candidates, 0.0)
    assert plan is not None
    return plan


P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def test_a_cached_prefix_draws_the_request() -> None:
    plan = decide(candidate("p0", P), candidate("p1", P, cached_tokens=512), candidate("d", D))
    assert plan.prefill == Target("p1")
    assert plan.predicted_cached_tokens == 512
    assert plan.reason == "disaggregated_prefix"


def test_a_queue_longer_than_the_prefix_is_worth_drives_it_away() -> None:
    near = candidate("p0", P, cached_tokens=512, queued_prefill_tokens=2000)
    assert decide(near, candidate("p1", P), candidate("d", D)).prefill == Target("p1")


def test_waiting_for_a_neighbours_identical_prefix_beats_computing_it_twice() -> None:
    """The first of many has just been sent: 1,000 tokens queued, all but 20 of which are shared."""
    busy = candidate("p0", P, cached_tokens=980, queued_prefill_tokens=1000)
    assert decide(busy, candidate("p1", P), candidate("d", D)).prefill == Target("p0")


def test_a_full_cache_counts_against_a_worker_even_when_nobody_is_busy() -> None:
    full = candidate("p0", P, held_tokens=100_000, cached_tokens=16)
    assert decide(full, candidate("p1", P), candidate("d", D)).prefill == Target("p1")


def test_a_slow_worker_gets_less() -> None:
    slow = candidate("p0", P, rates=Rates(prefill_fixed_s=0.0, prefill_token_s=0.01))
    assert decide(slow, candidate("p1", P), candidate("d", D)).prefill == Target("p1")


def test_decode_goes_to_the_smaller_batch() -> None:
    plan = decide(candidate("p", P), candidate("d0", D, streams=9), candidate("d1", D, streams=3))
    assert plan.decode == Target("d1")


def test_decode_goes_where_less_has_to_be_moved() -> None:
    plan = decide(candidate("p", P), candidate("d0", D), candidate("d1", D, cached_tokens=900))
    assert plan.decode == Target("d1")
    assert dict(plan.terms)["transfer_s"] == pytest.approx(100 * 100.0 * 1e-6)


def test_decode_avoids_a_worker_whose_memory_is_spoken_for() -> None:
    full = candidate("d0", D, reserved_kv_tokens=150_000)
    assert decide(candidate("p", P), full, candidate("d1", D, streams=1)).decode == Target("d1")


def test_a_plan_names_the_rank_that_holds_the_prefix() -> None:
    ranks = [candidate("p", P, rank, cached_tokens=512 * rank) for rank in (0, 1)]
    assert decide(*ranks, candidate("d", D)).prefill == Target("p", 1)


def test_auto_runs_a_short_prompt_whole_and_a_long_one_apart() -> None:
    slow_to_begin = Rates(0.0, 0.001, 0.01, 0.001, 0.05, 1e-6)
    fleet = candidate("p", P), candidate("d", D, streams=8, kv_token_bytes=10.0, rates=slow_to_begin)
    assert decide(*fleet, disaggregation="auto", view=request(4)).mode == "aggregated"
    assert decide(*fleet, disaggregation="auto", view=request(4000)).mode == "disaggregated"


def test_never_uses_workers_of_role_both_only() -> None:
    plan = decide(candidate("d", D), candidate("b", B, streams=50), disaggregation="never")
    assert (plan.prefill, plan.decode) == (None, Target("b"))


def test_always_takes_two_different_workers_even_if_one_would_be_cheaper() -> None:
    plan = decide(candidate("b0", B, cached_tokens=999), candidate("b1", B))
    assert plan.prefill is not None
    assert plan.prefill.worker_id != plan.decode.worker_id


@pytest.mark.parametrize("name", POLICIES)
def test_several_choices_run_whole_where_decoding_is_done(name: str) -> None:
    fleet = [candidate("p", P), candidate("d", D)]
    plan = policy(name).decide(request(choices=2), fleet, 0.0)
    assert plan is not None
    assert (plan.prefill, plan.decode) == (None, Target("d"))


def test_among_equals_all_get_their_share() -> None:
    chooser, fleet = policy(), [candidate(f"p{i}", P) for i in range(4)] + [candidate("d", D)]
    counts = dict[str, int]()
    for _ in range(400):
        plan = chooser.decide(request(), fleet, 0.0)
        assert plan is not None
        counts[plan.prefill_target.worker_id] = counts.get(plan.prefill_target.worker_id, 0) + 1
    assert min(counts.values()) > 40


def test_round_robin_takes_turns() -> None:
    chooser, fleet = policy("round_robin"), [candidate(f"p{i}", P) for i in range(3)] + [candidate("d", D)]
    plans = [chooser.decide(request(), fleet, 0.0) for _ in range(6)]
    assert sorted(plan.prefill_target.worker_id for plan in plans if plan) == [
        "p0",
        "p0",
        "p1",
        "p1",
        "p2",
        "p2",
    ]


def test_least_loaded_ignores_prefixes() -> None:
    fleet = [candidate("p0", P, cached_tokens=900, queued_prefill_tokens=1), candidate("p1", P)]
    plan = policy("least_loaded").decide(request(), [*fleet, candidate("d", D)], 0.0)
    assert plan is not None
    assert plan.prefill == Target("p1")


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
    name: str, roles: tuple[Role, ...], disaggregation: str, missing: str | None
) -> None:
    fleet = [candidate(f"w{i}", role) for i, role in enumerate(roles)]
    chooser = policy(name, disaggregation)
    assert chooser.missing(fleet) == missing
    assert (chooser.decide(request(), fleet, 0.0) is None) == (missing is not None)


amounts = st.integers(0, 10**9)


@given(
    name=st.sampled_from(POLICIES),
    disaggregation=st.sampled_from(["always", "auto", "never"]),
    fleet=st.lists(
        st.builds(
            candidate,
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(Role),
            st.integers(0, 1),
            cached_tokens=amounts,
            queued_prefill_tokens=amounts,
            streams=amounts,
            reserved_kv_tokens=amounts,
            held_tokens=amounts,
            kv_tokens=st.integers(1, 10**9),
        ),
        max_size=6,
    ),
    view=st.builds(request, st.integers(1, 10**7), st.integers(0, 10**6), st.integers(1, 3)),
    seed=st.integers(0, 9),
)
def test_no_load_makes_a_decision_raise_or_name_a_stranger(
    name: str, disaggregation: str, fleet: list[Candidate], view: RequestView, seed: int
) -> None:
    plan = policy(name, disaggregation, seed).decide(view, fleet, 0.0)
    targets = {c.target for c in fleet}
    if plan is not None:
        assert plan.decode in targets
        assert plan.prefill is None or plan.prefill in targets
        assert plan.prefill is None or plan.prefill.worker_id != plan.decode.worker_id
        assert disaggregation != "always" or plan.prefill is not None or view.choices > 1


def test_rates_start_at_the_prior_and_follow_measurements() -> None:
    book = RateBook(RATES)
    assert book.rates("w") == RATES
    for tokens in (100, 2000, 400, 1000) * 10:
        seconds = 0.02 + tokens * 0.0005
        book.observe("w", Usage(prompt_tokens=tokens), Timings(prefill_s=seconds), 1)
    assert book.rates("w").prefill_s(3000) == pytest.approx(1.52, rel=0.02)
    assert book.rates("other") == RATES
    book.forget("w")
    assert book.rates("w") == RATES


def test_cached_and_transferred_tokens_are_not_taken_for_computed_ones() -> None:
    book = RateBook(RATES)
    usage = Usage(prompt_tokens=1000, cached_tokens=400, transferred_tokens=600, transferred_bytes=10**6)
    book.observe("w", usage, Timings(prefill_s=5.0, transfer_s=0.5), 1)
    assert book.rates("w").prefill_s(1000) == RATES.prefill_s(1000)
    assert book.rates("w").transfer_s(1e6) != RATES.transfer_s(1e6)


def test_steps_are_learned_from_the_batch_they_ran_in() -> None:
    book = RateBook(RATES)
    for streams in (1, 8, 16, 4) * 10:
        usage = Usage(prompt_tokens=10, output_tokens=11)
        book.observe("w", usage, Timings(decode_s=10 * (0.02 + 0.002 * streams)), streams)
    assert book.rates("w").step_s(32) == pytest.approx(0.084, rel=0.03)


def test_measurements_of_one_size_only_are_met_there() -> None:
    fit = LinearFit(0.0, 0.001, 1000.0)
    for _ in range(50):
        fit.observe(500, 2.0)
    assert fit.fixed_s + 500 * fit.per_unit_s == pytest.approx(2.0, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), max_size=40))
def test_no_measurement_makes_a_rate_negative(measurements: list[tuple[float, float]]) -> None:
    fit = LinearFit(0.01, 0.001, 1000.0)
    for units, seconds in measurements:
        fit.observe(units, seconds)
        assert fit.fixed_s >= 0.0
        assert fit.per_unit_s >= 0.0
