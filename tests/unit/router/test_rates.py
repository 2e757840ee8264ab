"""What work is thought to cost: before anything was measured, and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.requests import Timings, Usage
from kvasir_router.decide import RateBook, Rates, rates_of
from kvasir_router.decide.rates import LinearFit, contention

MakeIdentity = Callable[..., WorkerIdentity]

PRIOR = Rates(
    prefill_fixed_s=0.0,
    prefill_token_s=0.001,
    step_fixed_s=0.01,
    step_stream_s=0.001,
    transfer_fixed_s=0.0,
    transfer_byte_s=1e-6,
)


@pytest.fixture
def book(make_identity: MakeIdentity) -> RateBook:
    book = RateBook(lambda identity: PRIOR)
    book.join("w", make_identity("w"))
    book.join("other", make_identity("other"))
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


def prefill_s(rates: Rates, tokens: int) -> float:
    return rates.prefill_fixed_s + tokens * rates.prefill_token_s


def step_s(rates: Rates, streams: int) -> float:
    return rates.step_fixed_s + streams * rates.step_stream_s


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
    assert rates_of(forget(llama_8b_on_h100)) == Rates()


def test_rates_start_at_the_prior_and_follow_measurements(book: RateBook) -> None:
    assert book.rates("w") == PRIOR
    for tokens in (100, 2000, 400, 1000) * 10:
        seconds = 0.02 + tokens * 0.0005
        book.observe("w", Usage(prompt_tokens=tokens), Timings(prefill_s=seconds), streams=0)
    assert prefill_s(book.rates("w"), 3000) == pytest.approx(1.52, rel=0.02)
    assert book.rates("other") == PRIOR


def test_a_worker_that_joins_again_begins_anew(book: RateBook, make_identity: MakeIdentity) -> None:
    book.observe("w", Usage(prompt_tokens=100), Timings(prefill_s=9.0), streams=0)
    assert book.rates("w") != PRIOR
    book.forget("w")
    assert book.join("w", make_identity("w")) == PRIOR
    assert book.rates("w") == PRIOR


def test_rates_follow_a_worker_that_becomes_slower(book: RateBook) -> None:
    for seconds in [1.0] * 100 + [2.0] * 100:
        book.observe("w", Usage(prompt_tokens=1000), Timings(prefill_s=seconds), streams=0)
    assert prefill_s(book.rates("w"), 1000) == pytest.approx(2.0, rel=0.05)


def test_cached_and_transferred_tokens_are_not_taken_for_computed_ones(book: RateBook) -> None:
    usage = Usage(prompt_tokens=1000, cached_tokens=400, transferred_tokens=600, transferred_bytes=10**6)
    rates = book.observe("w", usage, Timings(prefill_s=5.0, transfer_s=0.5), streams=0)
    assert prefill_s(rates, 1000) == prefill_s(PRIOR, 1000)
    assert rates.transfer_byte_s != PRIOR.transfer_byte_s


def test_steps_are_learned_from_the_batch_they_ran_in(book: RateBook) -> None:
    for streams in (1, 8, 16, 4) * 10:
        usage = Usage(prompt_tokens=10, output_tokens=11)
        timings = Timings(decode_s=10 * (0.02 + 0.002 * streams))
        rates = book.observe("w", usage, timings, streams=streams)
    assert step_s(rates, 32) == pytest.approx(0.084, rel=0.03)


def test_a_prompt_among_streams_is_not_taken_for_a_slow_one(book: RateBook) -> None:
    """2,048 tokens in one step beside 20 streams take 30 ms more than alone."""
    for _ in range(100):
        usage = Usage(prompt_tokens=2048, output_tokens=1)
        rates = book.observe("w", usage, Timings(prefill_s=2.048 + 0.03), streams=20)
    assert prefill_s(rates, 2048) == pytest.approx(2.048, rel=0.01)


def test_prompts_and_steps_are_told_apart_though_neither_is_ever_seen_alone(book: RateBook) -> None:
    """Eight of ten steps carry a chunk of 2,048 tokens (64 ms), and a step of 16 streams takes 20 ms."""
    chunk, step, streams = 0.064, 0.020, 16
    for _ in range(400):
        usage = Usage(prompt_tokens=20_480, output_tokens=101)
        timings = Timings(prefill_s=10 * (chunk + step), decode_s=100 * (step + 0.8 * chunk))
        rates = book.observe("w", usage, timings, streams=streams + 1, beside_tokens=80 * 2048)
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


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), max_size=40))
def test_no_measurement_makes_a_rate_negative(measurements: list[tuple[float, float]]) -> None:
    fit = LinearFit(0.01, 0.001, 1000.0)
    for units, seconds in measurements:
        fit.observe(units, seconds)
        assert fit.fixed_s >= 0.0
        assert fit.per_unit_s >= 0.0
