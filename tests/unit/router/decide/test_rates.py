"""Estimated cost of work, before and after measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import public_models

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import Timings, Usage
from kvasir.performance.profile import FORMAT, CalibratedProfile, EngineProfile
from kvasir.performance.work import model_work
from kvasir_router.decide import CostRates, RateBook, WorkerPriors, rates_of
from kvasir_router.decide.fits import LinearFit
from kvasir_router.decide.rates import contention

MakeIdentity = Callable[..., WorkerIdentity]

PRIOR = CostRates(
    prefill_fixed_s=0.0,
    prefill_token_s=0.001,
    step_fixed_s=0.01,
    step_stream_s=0.001,
    transfer_fixed_s=0.0,
    transfer_byte_s=1e-6,
)
MIB = 1 << 20


@pytest.fixture
def book(make_identity: MakeIdentity) -> RateBook:
    book = RateBook(lambda identity: PRIOR)
    book.join("w", make_identity("w"))
    book.join("other", replace(make_identity("other"), model="another"))
    return book


@pytest.fixture
def llama_8b_on_h100(make_identity: MakeIdentity) -> WorkerIdentity:
    return replace(
        make_identity("gpu"),
        kv=KvLayout(16, "bfloat16", "nhd", 32, 8, 128, 16 * 131_072),
        hardware=Hardware("H100 SXM", 1, 9.89e14, 3.35e12),
        model_parameters=8_030_000_000,
        model_bytes=16_060_000_000,
    )


def prefill_s(rates: CostRates, tokens: int) -> float:
    return rates.prefill_fixed_s + tokens * rates.prefill_token_s


def step_s(rates: CostRates, streams: int) -> float:
    return rates.step_fixed_s + streams * rates.step_stream_s


def tier(medium: Medium, loads: int, seconds: float, loaded: int) -> TierLoad:
    return TierLoad(medium, loads=loads, load_s=seconds, loaded_bytes=loaded)


def test_the_priors_of_an_8b_model_on_an_h100_are_of_the_order_that_people_measure(
    llama_8b_on_h100: WorkerIdentity,
) -> None:
    """Tens of thousands of prompt tokens a second, steps of about 10 ms for one stream."""
    rates = rates_of(llama_8b_on_h100)
    assert 15_000 < 1 / rates.prefill_token_s < 40_000
    assert 0.006 < step_s(rates, 1) < 0.015
    assert 0.010 < step_s(rates, 32) < 0.040


def test_more_devices_and_smaller_models_are_faster(llama_8b_on_h100: WorkerIdentity) -> None:
    one = rates_of(llama_8b_on_h100)
    two = rates_of(replace(llama_8b_on_h100, hardware=replace(llama_8b_on_h100.hardware, devices=2)))
    small = rates_of(replace(llama_8b_on_h100, model_parameters=10**9, model_bytes=2 * 10**9))
    assert two.prefill_token_s < one.prefill_token_s
    assert two.step_fixed_s < one.step_fixed_s
    assert small.prefill_token_s < one.prefill_token_s
    assert small.step_fixed_s < one.step_fixed_s


@pytest.mark.parametrize(
    "forget",
    [
        lambda known: replace(known, hardware=replace(known.hardware, flops=0.0)),
        lambda known: replace(known, hardware=replace(known.hardware, bytes_per_s=0.0)),
        lambda known: replace(known, model_parameters=0),
        lambda known: replace(known, model_bytes=0),
    ],
)
def test_what_does_not_say_what_it_is_begins_as_a_small_model(
    llama_8b_on_h100: WorkerIdentity, forget: Callable[[WorkerIdentity], WorkerIdentity]
) -> None:
    assert rates_of(forget(llama_8b_on_h100)) == CostRates()


def _profile(of: WorkerIdentity) -> CalibratedProfile:
    engine = EngineProfile(
        pool=of.pool,
        role=of.role.value,
        device=of.hardware.device,
        devices=of.hardware.devices,
        parameters=of.model_parameters,
        model_bytes=of.model_bytes,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        coefficients={"arithmetic": 0.25, "bandwidth": 0.35, "step_s": 0.004},
    )
    return CalibratedProfile(FORMAT, "another name", "2026-01-02", {}, (engine,), 0.001, 1e-9)


def test_a_profile_of_its_hardware_and_model_replaces_the_data_sheet(
    llama_8b_on_h100: WorkerIdentity,
) -> None:
    priors = WorkerPriors(_profile(llama_8b_on_h100))
    measured, published = priors(llama_8b_on_h100), rates_of(llama_8b_on_h100)
    assert measured.prefill_token_s == pytest.approx(2 * published.prefill_token_s, rel=0.1)
    assert measured.step_fixed_s == pytest.approx(2 * published.step_fixed_s, rel=0.1)
    assert (measured.transfer_fixed_s, measured.transfer_byte_s) == (0.001, 1e-9)
    assert priors.source(llama_8b_on_h100) == "profile of 2026-01-02"


def test_a_profile_of_other_hardware_or_another_model_does_not_count(
    llama_8b_on_h100: WorkerIdentity,
) -> None:
    priors = WorkerPriors(_profile(llama_8b_on_h100))
    for other in (
        replace(llama_8b_on_h100, hardware=replace(llama_8b_on_h100.hardware, devices=2)),
        replace(llama_8b_on_h100, model_bytes=llama_8b_on_h100.model_bytes // 2),
    ):
        assert priors(other) == rates_of(other)
        assert priors.source(other) == "data sheet"
    unknown = replace(llama_8b_on_h100, model_parameters=0)
    assert priors.source(unknown) == "defaults"


def test_a_profile_gives_rates_to_hardware_that_no_data_sheet_has(llama_8b_on_h100: WorkerIdentity) -> None:
    cpu = replace(llama_8b_on_h100, hardware=Hardware("a CPU", 1))
    assert rates_of(cpu) == CostRates()
    assert WorkerPriors(_profile(cpu))(cpu) != CostRates()


def test_a_mixture_of_experts_prefills_as_fast_as_the_experts_that_a_token_uses(
    llama_8b_on_h100: WorkerIdentity,
) -> None:
    dense = replace(llama_8b_on_h100, model_parameters=30_000_000_000, model_bytes=60_000_000_000)
    config = public_models.config_of(public_models.QWEN3_30B)
    sparse = replace(dense, work=model_work(config))
    assert rates_of(sparse).prefill_token_s < rates_of(dense).prefill_token_s / 4


def test_rates_start_at_the_prior_and_follow_measurements(book: RateBook) -> None:
    assert book.rates("w") == PRIOR
    for tokens in (100, 2000, 400, 1000) * 10:
        seconds = 0.02 + tokens * 0.0005
        book.observe("w", Usage(prompt_tokens=tokens), Timings(prefill_s=seconds), streams=0)
    assert prefill_s(book.rates("w"), 3000) == pytest.approx(1.52, rel=0.02)
    assert book.rates("other") == PRIOR


def test_workers_of_one_pool_and_hardware_have_equal_rates_however_late_they_join(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    book.join("idle", make_identity("idle"))
    for tokens in (100, 2000, 400, 1000) * 6:
        book.observe("w", Usage(prompt_tokens=tokens), Timings(prefill_s=tokens * 0.0001), streams=0)
        assert prefill_s(book.rates("idle"), 500) < 1.5 * prefill_s(book.rates("w"), 500)
    late = book.join("late", make_identity("late"))
    assert late == book.join("later", make_identity("later"))
    for rates in (late, book.rates("idle")):
        assert prefill_s(rates, 1000) == pytest.approx(0.1, rel=0.15)
    elsewhere = replace(make_identity("gpu"), hardware=Hardware("H200", 1, 9.9e14, 4.8e12))
    assert book.join("gpu", elsewhere) == book.rates("other") == PRIOR


def test_all_that_a_pool_measures_is_believed_of_those_that_have_measured_nothing(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    book.join("idle", make_identity("idle"))
    usage = Usage(prompt_tokens=2000, transferred_tokens=1000, transferred_bytes=10**8, output_tokens=11)
    timings = Timings(prefill_s=9.0, transfer_s=9.0, decode_s=9.0)
    changed = book.observe("w", usage, timings, streams=3)
    changed |= book.loaded("w", [tier(medium, 1, 9.0, MIB) for medium in (Medium.CPU, Medium.REMOTE)])
    assert changed == {"w", "idle"}
    idle = book.rates("idle")
    assert prefill_s(idle, 1000) > 5.0 * prefill_s(PRIOR, 1000)
    assert step_s(idle, 3) > 5.0 * step_s(PRIOR, 3)
    assert idle.transfer_byte_s != PRIOR.transfer_byte_s
    assert [a > b for a, b in zip(idle.tier_fixed_s, PRIOR.tier_fixed_s, strict=True)] == [True, False, True]


def test_a_worker_that_differs_from_its_pool_is_known_by_its_own_measurements(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    book.join("slow", make_identity("slow"))
    book.observe("slow", Usage(prompt_tokens=1000), Timings(prefill_s=0.4), streams=0)
    for _ in range(40):
        book.observe("w", Usage(prompt_tokens=1000), Timings(prefill_s=0.1), streams=0)
        book.observe("slow", Usage(prompt_tokens=1000), Timings(prefill_s=0.4), streams=0)
    assert prefill_s(book.rates("w"), 1000) == pytest.approx(0.1, rel=0.2)
    assert prefill_s(book.rates("slow"), 1000) == pytest.approx(0.4, rel=0.1)


def test_workers_that_hardly_differ_have_the_same_rates_to_the_last_digit(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    book.join("peer", make_identity("peer"))
    for number in range(40):
        for worker_id in ("w", "peer"):
            seconds = 0.1 + 0.005 * ((number + (worker_id == "peer")) % 2)
            book.observe(worker_id, Usage(prompt_tokens=1000), Timings(prefill_s=seconds), streams=0)
            assert book.rates("w") == book.rates("peer") or number < 8
    assert prefill_s(book.rates("w"), 1000) == pytest.approx(0.1025, rel=0.1)


def test_what_hardly_changes_is_not_told_to_many_workers_all_the_time(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    for number in range(60):
        book.join(f"idle-{number}", make_identity(f"idle-{number}"))
    told = [
        len(book.observe("w", Usage(prompt_tokens=1000), Timings(prefill_s=0.1), streams=0))
        for _ in range(100)
    ]
    assert told[0] == 61
    assert told[20:].count(0) >= 78


def test_those_who_measure_nothing_follow_their_pool_for_as_long(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    book.join("idle", make_identity("idle"))
    for seconds in [1.0] * 50 + [3.0] * 200:
        book.observe("w", Usage(prompt_tokens=1000), Timings(prefill_s=seconds), streams=0)
    assert prefill_s(book.rates("idle"), 1000) == pytest.approx(3.0, rel=0.05)


def test_a_worker_that_joins_again_begins_with_what_its_pool_has_measured(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    book.observe("w", Usage(prompt_tokens=100), Timings(prefill_s=9.0), streams=0)
    book.forget("w")
    with pytest.raises(KeyError):
        book.rates("w")
    assert prefill_s(book.join("w", make_identity("w")), 100) == pytest.approx(9.0, rel=0.3)


def test_pools_without_workers_are_not_remembered_for_ever(
    book: RateBook, make_identity: MakeIdentity
) -> None:
    for number in range(200):
        identity = replace(make_identity("x"), model=f"model-{number}")
        book.join("x", identity)
        book.observe("x", Usage(prompt_tokens=100), Timings(prefill_s=9.0), streams=0)
        book.forget("x")
    assert book.join("x", replace(make_identity("x"), model="model-0")) == PRIOR
    assert book.join("y", replace(make_identity("y"), model="model-199")) != PRIOR


@pytest.fixture
def prefill_pool(make_identity: MakeIdentity) -> WorkerIdentity:
    """A pool of the model and hardware of `w`, with blocks of its own."""
    identity = make_identity("p")
    return replace(identity, pool="prefill", kv=replace(identity.kv, tensor_parallel_size=2))


def measure_prefills(book: RateBook, worker_id: str, token_s: float, times: int = 20) -> None:
    for tokens in (100, 2000, 400, 1000) * (times // 4):
        book.observe(
            worker_id, Usage(prompt_tokens=tokens), Timings(prefill_s=0.02 + tokens * token_s), streams=0
        )


def test_a_pool_that_has_measured_nothing_expects_what_another_on_its_hardware_has_measured(
    book: RateBook, prefill_pool: WorkerIdentity
) -> None:
    """A decode pool that prefills at a tenth of the roofline says so of the prefill pool as well."""
    book.join("p", prefill_pool)
    measure_prefills(book, "w", 10 * PRIOR.prefill_token_s)
    assert prefill_s(book.rates("p"), 1000) == pytest.approx(prefill_s(book.rates("w"), 1000), rel=0.06)
    assert step_s(book.rates("p"), 4) == step_s(PRIOR, 4)
    assert book.rates("other") == PRIOR


def test_a_pool_that_joins_late_begins_with_what_another_on_its_hardware_has_measured(
    book: RateBook, prefill_pool: WorkerIdentity
) -> None:
    measure_prefills(book, "w", 10 * PRIOR.prefill_token_s)
    late = book.join("p", prefill_pool)
    assert prefill_s(late, 1000) == pytest.approx(prefill_s(book.rates("w"), 1000), rel=0.01)
    assert late.step_fixed_s == PRIOR.step_fixed_s
    elsewhere = replace(prefill_pool, hardware=Hardware("H200", 1, 9.9e14, 4.8e12))
    assert book.join("h200", elsewhere) == PRIOR


def test_a_pool_that_measures_for_itself_follows_its_own_measurements(
    book: RateBook, prefill_pool: WorkerIdentity
) -> None:
    book.join("p", prefill_pool)
    for _ in range(20):
        measure_prefills(book, "w", 0.01, times=4)
        measure_prefills(book, "p", 0.002, times=4)
    assert prefill_s(book.rates("w"), 1000) == pytest.approx(10.02, rel=0.05)
    assert prefill_s(book.rates("p"), 1000) == pytest.approx(2.02, rel=0.05)


def test_pools_of_one_hardware_tell_each_other_only_what_has_changed(
    book: RateBook, prefill_pool: WorkerIdentity
) -> None:
    book.join("p", prefill_pool)
    told = [
        book.observe("w", Usage(prompt_tokens=size), Timings(prefill_s=size * 1e-4), streams=0)
        for size in (1000, 2000, 100, 400) * 15
    ]
    assert told[0] == {"w", "p"}
    assert not any("p" in workers for workers in told[40:])


def test_each_tiers_rate_is_learned_from_what_its_counters_have_grown_by(book: RateBook) -> None:
    loads, seconds, loaded = 0, 0.0, 0
    for size in (1, 64, 4, 16) * 10:
        loads, loaded = loads + 2, loaded + 2 * size * MIB
        seconds += 2 * (0.004 + size * MIB * 1e-9)
        book.loaded("w", [tier(Medium.DISK, loads, seconds, loaded)])
    rates = book.rates("w")
    took = rates.tier_fixed_s[1] + 32 * MIB * rates.tier_byte_s[1]
    assert took == pytest.approx(0.004 + 32 * MIB * 1e-9, rel=0.05)
    assert rates.tier_fixed_s[0] == PRIOR.tier_fixed_s[0]
    assert rates.tier_byte_s[2] == PRIOR.tier_byte_s[2]


def test_a_tier_that_has_loaded_nothing_since_says_nothing(book: RateBook) -> None:
    report = [tier(Medium.CPU, 3, 0.5, 3 * MIB)]
    assert book.loaded("w", report) == {"w"}
    assert book.loaded("w", report) == set()
    assert book.loaded("w", [tier(Medium.REMOTE, 0, 0.0, 0)]) == set()


def test_counters_that_begin_anew_are_not_taken_for_a_load_of_less_than_nothing(book: RateBook) -> None:
    book.loaded("w", [tier(Medium.CPU, 100, 50.0, 100 * MIB)])
    for loads in range(1, 20):
        book.loaded("w", [tier(Medium.CPU, loads, 2.0 * loads, loads * MIB)])
    rates = book.rates("w")
    assert rates.tier_fixed_s[0] + MIB * rates.tier_byte_s[0] == pytest.approx(2.0, rel=0.15)


def test_rates_follow_a_worker_that_becomes_slower(book: RateBook) -> None:
    for seconds in [1.0] * 100 + [2.0] * 100:
        book.observe("w", Usage(prompt_tokens=1000), Timings(prefill_s=seconds), streams=0)
    assert prefill_s(book.rates("w"), 1000) == pytest.approx(2.0, rel=0.05)


def test_cached_and_transferred_tokens_are_not_taken_for_computed_ones(book: RateBook) -> None:
    usage = Usage(prompt_tokens=1000, cached_tokens=400, transferred_tokens=600, transferred_bytes=10**6)
    book.observe("w", usage, Timings(prefill_s=5.0, transfer_s=0.5), streams=0)
    rates = book.rates("w")
    assert prefill_s(rates, 1000) == prefill_s(PRIOR, 1000)
    assert rates.transfer_byte_s != PRIOR.transfer_byte_s


def test_steps_are_learned_from_the_batch_they_ran_in(book: RateBook) -> None:
    for streams in (1, 8, 16, 4) * 10:
        usage = Usage(prompt_tokens=10, output_tokens=11)
        timings = Timings(decode_s=10 * (0.02 + 0.002 * streams))
        book.observe("w", usage, timings, streams=streams)
    assert step_s(book.rates("w"), 32) == pytest.approx(0.084, rel=0.03)


def test_a_worker_that_speculates_is_known_by_its_tokens_and_not_by_its_steps(
    make_identity: MakeIdentity,
) -> None:
    """Three of four proposals accepted: a step of 40 ms gives four tokens, and a stream of 401 takes 4 s."""
    book = RateBook()
    for name, pool, seconds in (("plain", "a", 16.0), ("drafted", "b", 4.0)):
        book.join(name, replace(make_identity(name), pool=pool))
        for _ in range(50):
            book.observe(
                name, Usage(prompt_tokens=10, output_tokens=401), Timings(decode_s=seconds), streams=4
            )
    assert step_s(book.rates("plain"), 4) == pytest.approx(0.04, rel=0.05)
    assert step_s(book.rates("drafted"), 4) == pytest.approx(0.01, rel=0.05)


def test_a_prompt_among_streams_is_not_taken_for_a_slow_one(book: RateBook) -> None:
    """2,048 tokens in one step beside 20 streams take 30 ms more than alone."""
    for _ in range(100):
        usage = Usage(prompt_tokens=2048, output_tokens=1)
        book.observe("w", usage, Timings(prefill_s=2.048 + 0.03), streams=20)
    assert prefill_s(book.rates("w"), 2048) == pytest.approx(2.048, rel=0.01)


def test_prompts_and_steps_are_told_apart_though_neither_is_ever_seen_alone(book: RateBook) -> None:
    """Eight of ten steps carry a chunk of 2,048 tokens (64 ms), and a step of 16 streams takes 20 ms."""
    chunk, step, streams = 0.064, 0.020, 16
    for _ in range(400):
        usage = Usage(prompt_tokens=20_480, output_tokens=101)
        timings = Timings(prefill_s=10 * (chunk + step), decode_s=100 * (step + 0.8 * chunk))
        book.observe("w", usage, timings, streams=streams + 1, beside_tokens=80 * 2048)
    rates = book.rates("w")
    assert prefill_s(rates, 20_480) == pytest.approx(10 * chunk, rel=0.1)
    assert step_s(rates, streams) == pytest.approx(step, rel=0.35)


def test_an_engine_without_streams_or_without_a_prefill_rate_shares_its_steps_with_nobody() -> None:
    assert contention(PRIOR, 0) == 1.0
    assert contention(PRIOR._replace(prefill_token_s=0.0), 9) == 1.0


def test_measurements_of_one_size_only_are_met_there() -> None:
    fit = LinearFit(0.0, 0.001, 1000.0)
    for _ in range(50):
        fit.observe(500, 2.0)
    assert fit.fixed_s + 500 * fit.per_unit_s == pytest.approx(2.0, rel=0.05)


def test_costs_that_grow_with_the_square_keep_their_total() -> None:
    fit, tokens = LinearFit(0.0, 1e-6, 1024.0), (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
    took = [1e-4 * each + 1e-8 * each**2 for each in tokens]
    for _ in range(100):
        for units, seconds in zip(tokens, took, strict=True):
            fit.observe(units, seconds)
    assert fit.fixed_s == 0.0
    assert sum(tokens) * fit.per_unit_s == pytest.approx(sum(took), rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), max_size=40))
def test_no_measurement_makes_a_rate_negative(measurements: list[tuple[float, float]]) -> None:
    fit = LinearFit(0.01, 0.001, 1000.0)
    for units, seconds in measurements:
        fit.observe(units, seconds)
        assert fit.fixed_s >= 0.0
        assert fit.per_unit_s >= 0.0
