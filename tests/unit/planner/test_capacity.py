"""The load that one replica can serve within the SLO."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.demand import Traffic, WorkerStats
from kvasir.core.requests import Role
from kvasir_platform.planner.capacity import SloTarget, SteadyRates, WorkerRates, capacity, seats
from kvasir_platform.planner.demand import Interval, Mix

RATES = WorkerRates(0.1, 0.001, 0.01, 0.001, kv_tokens=1_000_000.0, used_per_stream=0.0)
PROMISE = SloTarget(ttft_s=5.0, itl_s=0.1)
FIGURES = WorkerStats("w", "decode", Role.DECODE, True, 0.1, 0.001, 0.01, 0.001, 0, 1000, 0, 0)


def mix(computed: tuple[int, ...] = (900,), prompt: int = 1000, output: int = 100) -> Mix:
    found, count = Mix(), len(computed)
    found.take(
        Interval(
            10.0,
            Traffic(
                ended=count,
                prompt_tokens=prompt * count,
                computed_tokens=sum(computed),
                computed_squares=sum(each**2 for each in computed),
                output_tokens=output * count,
            ),
        )
    )
    return found


def test_there_are_no_rates_where_there_are_no_workers() -> None:
    assert WorkerRates.of([]) is None


def test_the_typical_worker_is_the_one_in_the_middle() -> None:
    workers = [
        replace(FIGURES, step_fixed_s=step, used_tokens=used, streams=streams)
        for step, used, streams in ((0.01, 100, 1), (0.02, 500, 3), (9.0, 0, 0))
    ]
    rates = WorkerRates.of(workers)
    assert rates is not None
    assert (rates.step_fixed_s, rates.used_per_stream) == (0.02, 150.0)


def test_errors_of_fitted_times_average_out() -> None:
    steady, found = SteadyRates(), []
    for times in (1.5, 0.5) * 100:
        found.append(steady.take(replace(RATES, step_stream_s=times * RATES.step_stream_s), 15.0))
    assert found[0].step_stream_s == 1.5 * RATES.step_stream_s
    assert found[-1].step_stream_s == pytest.approx(RATES.step_stream_s, rel=0.05)


def test_times_that_stay_the_same_are_not_changed_by_averaging() -> None:
    steady = SteadyRates()
    assert {steady.take(RATES, seconds) for seconds in (5.0, 15.0, 0.1) * 50} == {RATES}


def test_a_worker_that_became_slower_is_believed_within_minutes() -> None:
    steady, slower = SteadyRates(), replace(RATES, prefill_token_s=2 * RATES.prefill_token_s)
    for rates in (RATES,) * 400 + (slower,) * 60:
        found = steady.take(rates, 15.0)
    assert found.prefill_token_s == pytest.approx(slower.prefill_token_s, rel=0.05)


def test_the_memory_that_streams_hold_is_that_of_the_moment() -> None:
    steady = SteadyRates()
    steady.take(RATES, 15.0)
    assert steady.take(replace(RATES, used_per_stream=700.0), 15.0).used_per_stream == 700.0


def test_prompts_are_computed_one_after_the_other() -> None:
    # 0.1 s and 900 times a millisecond.
    found = capacity(RATES, mix(), PROMISE, Role.PREFILL, most_streams=64)
    assert found.prompt_tokens_s == pytest.approx(900.0)


@pytest.mark.parametrize(
    ("rates", "promise", "most", "streams", "by"),
    [
        # 0.09 s for a step, of which 0.01 are there without a stream.
        (RATES, PROMISE, 1000, 80, "itl"),
        (RATES, PROMISE, 16, 16, "seats"),
        (replace(RATES, kv_tokens=10_500.0), PROMISE, 1000, 9, "memory"),
        (replace(RATES, kv_tokens=10_500.0, used_per_stream=525.0), PROMISE, 1000, 19, "memory"),
        (RATES, SloTarget(5.0, 0.001), 1000, 1, "itl"),
    ],
    ids=["step", "seats", "memory by the mix", "memory as it is used", "a promise that nobody can keep"],
)
def test_a_decoding_replica_is_full_by_what_runs_out_first(
    rates: WorkerRates, promise: SloTarget, most: int, streams: int, by: str
) -> None:
    found = capacity(rates, mix(), promise, Role.DECODE, most_streams=most)
    assert (found.streams, found.by) == (streams, by)
    assert found.output_tokens_s == pytest.approx(streams / (0.01 + streams * 0.001))


def test_what_keeps_waits_short_is_more_for_long_prompts_a_tight_promise_and_an_uneven_mix() -> None:
    def spare(found: Mix, ttft_s: float = 5.0) -> float:
        return capacity(RATES, found, SloTarget(ttft_s, 0.1), Role.PREFILL, most_streams=64).spare

    usual = spare(mix())
    # A prompt takes one second, and four are left to wait.
    assert usual == pytest.approx(1.0 / 4.0 * math.log(200.0) / 2)
    assert spare(mix((1900,), prompt=2000)) > usual
    assert spare(mix(), ttft_s=2.0) > usual
    assert spare(mix((100, 1700))) > usual
    # A promise shorter than a prompt takes asks for much, and not for infinity.
    assert usual < spare(mix(), ttft_s=0.5) < 100


@given(
    st.builds(
        WorkerRates,
        *[st.sampled_from([0.0, 1e-4, 0.05])] * 4,
        kv_tokens=st.sampled_from([0.0, 100.0, 1e6]),
        used_per_stream=st.sampled_from([0.0, 500.0]),
    ),
    st.lists(st.sampled_from([0, 1, 5000]), min_size=1, max_size=3),
    st.sampled_from([0, 1, 700]),
    st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]),
)
def test_whatever_was_measured_a_replica_can_do_something(
    rates: WorkerRates, computed: list[int], output: int, role: Role
) -> None:
    found = capacity(rates, mix(tuple(computed), output=output), PROMISE, role, most_streams=8)
    assert 1 <= found.streams <= 8
    assert 0.0 < found.prompt_tokens_s < math.inf
    assert found.output_tokens_s > 0.0
    assert 0.0 <= found.spare < math.inf


def test_a_replica_that_makes_embeddings_is_told_by_its_seats() -> None:
    found = seats(100)
    assert found.prompt_tokens_s == pytest.approx(70.0)
    assert (found.spare, found.by) == (0.0, "seats")
