"""The fit finds the coefficients that made the samples, and says how far it is off."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.kit import public_models as models

from kvasir.hardware.gpus import gpu_named
from kvasir.performance.coefficients import Coefficients
from kvasir.performance.device import device_of, reference_device
from kvasir.performance.step import EngineModel, PromptChunk, StepWork
from kvasir.performance.work import dense_work, model_work
from kvasir.sizing.shape import EngineShape
from kvasir_platform.calibrate.fit import busy_request_s, fit_engine, fit_line, non_negative
from kvasir_platform.calibrate.samples import (
    BusySample,
    StepSample,
    TransferTimes,
    burst_sample,
    decode_sample,
    hand_over_sample,
    mixed_sample,
    prefill_sample,
    slowed_by,
)

_GPU = gpu_named("H100")
assert _GPU is not None
_SHAPE = EngineShape(max_num_batched_tokens=2048)
_ENGINE = EngineModel(model_work(models.config_of(models.LLAMA_8B)), device_of(_GPU), _SHAPE)
_TRUE = Coefficients(
    arithmetic=0.62, attention=0.2, bandwidth=0.81, step_s=0.0031, stream_s=4e-5, prompt_s=3e-4,
    request_s=0.011,
)  # fmt: skip


def _seconds(engine: EngineModel, sample: StepSample, noise: float = 1.0) -> StepSample:
    found = sum(times * engine.step(work).seconds for work, times in sample.steps)
    return replace(sample, seconds=(found + sample.requests * engine.coefficients.request_s) * noise)


def _samples(engine: EngineModel, noise: float = 0.0) -> list[StepSample]:
    rng = random.Random(3)
    prompts = [prefill_sample(n, 0, 1.0, budget=2048) for n in (16, 64, 256, 512, 1024, 2048, 4096, 8192)]
    cached = [prefill_sample(n + 64, n, 1.0, budget=2048) for n in (512, 2048, 8192)]
    bursts = [burst_sample(n, 64, 1.0, budget=2048) for n in (4, 16, 64)]
    decoding = [
        decode_sample(n, context, 1.0) for n in (1, 2, 4, 8, 16, 32, 64) for context in (128, 2000, 8000)
    ]
    made = [*prompts, *cached, *bursts, *decoding]
    return [_seconds(engine, each, 1.0 + noise * rng.uniform(-1, 1)) for each in made]


def test_the_fit_finds_the_coefficients_that_made_the_samples() -> None:
    fitted = fit_engine(_ENGINE, _samples(replace(_ENGINE, coefficients=_TRUE)))
    assert max(each.error for each in fitted.residuals) < 0.03
    found = fitted.coefficients
    for name in ("arithmetic", "bandwidth", "request_s"):
        assert getattr(found, name) == pytest.approx(getattr(_TRUE, name), rel=0.05)


def test_a_fit_of_noisy_samples_predicts_other_loads() -> None:
    true = replace(_ENGINE, coefficients=_TRUE)
    fitted = replace(_ENGINE, coefficients=fit_engine(_ENGINE, _samples(true, 0.1)).coefficients)
    for work in (
        StepWork((PromptChunk(700, 300),), streams=12, context=900),
        StepWork(streams=48, context=3000),
        StepWork((PromptChunk(1500),)),
    ):
        assert fitted.step(work).seconds == pytest.approx(true.step(work).seconds, rel=0.1)


def test_what_a_step_takes_longer_for_prompts_beside_streams_is_found() -> None:
    true = replace(_ENGINE, coefficients=replace(_TRUE, mixed_s=0.02))
    mixed = [_seconds(true, mixed_sample(4, 160, {512: 0.15, 64: 0.2}, 1.0))]
    found = replace(_ENGINE, coefficients=fit_engine(_ENGINE, _samples(true) + mixed).coefficients)
    assert found.coefficients.mixed_s == pytest.approx(0.02, rel=0.1)
    for work in (StepWork((PromptChunk(300),), 9, 400), StepWork((PromptChunk(300),)), StepWork((), 9, 400)):
        assert found.step(work).seconds == pytest.approx(true.step(work).seconds, rel=0.05)


def test_a_device_of_unknown_rates_is_fitted_by_what_it_does() -> None:
    work = dense_work(parameters=5e6, layers=4, hidden=256, kv_elements=256)
    engine = EngineModel(work, reference_device("some CPU"), _SHAPE)
    true = replace(
        engine,
        coefficients=Coefficients(
            arithmetic=0.15, attention=0.05, bandwidth=0.1, step_s=0.004, stream_s=2e-4
        ),
    )
    fitted = replace(engine, coefficients=fit_engine(engine, _samples(true)).coefficients)
    for sample in _samples(true):
        assert _seconds(fitted, sample).seconds == pytest.approx(sample.seconds, rel=0.03)


def test_no_coefficient_is_negative() -> None:
    falling = [
        decode_sample(1, 100, 0.02),
        decode_sample(8, 100, 0.01),
        prefill_sample(64, 0, 0.001, budget=512),
    ]
    found = fit_engine(_ENGINE, falling).coefficients
    assert min(found.step_s, found.stream_s, found.prompt_s, found.request_s) >= 0.0
    assert min(found.arithmetic, found.attention, found.bandwidth) > 0.0


def test_least_squares_keep_to_zero_where_the_optimum_is_negative() -> None:
    table = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative(table, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(table, np.array([1.0, 3.0, 5.0])) == pytest.approx([1.0, 2.0])


def test_transfers_give_a_fixed_time_and_a_rate() -> None:
    made = [TransferTimes(size, 0.003 + size / 2e9) for size in (10_000, 1_000_000, 50_000_000)]
    fixed_s, byte_s = fit_line(made)
    assert fixed_s == pytest.approx(0.003, rel=0.01)
    assert byte_s == pytest.approx(1 / 2e9, rel=0.01)
    assert fit_line([]) == (0.0, 0.0)


def test_there_is_no_fit_without_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        fit_engine(_ENGINE, [])


def test_samples_name_the_steps_that_ran() -> None:
    chunks = prefill_sample(5000, 1000, 1.0, budget=2048).steps
    assert [(work.prompts[0].tokens, work.prompts[0].context) for work, _ in chunks] == [
        (2048, 1000),
        (1952, 3048),
    ]
    burst = burst_sample(65, 64, 1.0, budget=2048).steps
    assert [(len(work.prompts), work.mixed) for work, _ in burst] == [(1, False), (32, False), (32, False)]
    mixed = mixed_sample(4, 100, {512: 0.25, 64: 0.5}, 1.0).steps
    assert [([each.tokens for each in work.prompts], work.streams, share) for work, share in mixed] == [
        ([64], 4, 0.5),
        ([512], 4, 0.25),
        ([], 4, 0.25),
    ]
    crowded = mixed_sample(4, 100, {512: 0.75, 64: 0.5}, 1.0).steps
    assert [share for _, share in crowded] == [0.75, 0.25, 0.0]
    ((last, _),) = hand_over_sample(500, 1.0).steps
    assert (last.prompts[0].tokens, last.prompts[0].context) == (1, 499)


def test_what_precedes_a_step_beside_others_is_what_their_steps_leave() -> None:
    engine = replace(_ENGINE, coefficients=_TRUE)
    chunk = PromptChunk(64)
    steps = engine.step(StepWork((chunk,), 4, 500)).seconds + engine.decode(4, 500).seconds / 2
    assert busy_request_s(engine, [BusySample(chunk, 4, 500, steps + 0.03)], waits=True) == pytest.approx(
        0.03
    )
    assert busy_request_s(engine, [BusySample(chunk, 4, 500, steps)], waits=True) == _TRUE.request_s
    alone = engine.step(StepWork((chunk,))).seconds
    assert busy_request_s(engine, [BusySample(chunk, 4, 500, alone + 0.03)], waits=False) == pytest.approx(
        0.03
    )
    assert busy_request_s(engine, [], waits=True) == 0.0
    shared = replace(_ENGINE, coefficients=replace(_TRUE, shared=0.5))
    for waits, others in ((True, steps), (False, alone)):
        sample = BusySample(chunk, 4, 500, 1.5 * others + 0.03)
        assert busy_request_s(shared, [sample], waits=waits) == pytest.approx(0.03)


def test_steps_are_slower_only_while_the_other_engine_computes() -> None:
    assert slowed_by(0.006, 0.004, 1.0) == pytest.approx(0.5)
    assert slowed_by(0.006, 0.004, 0.5) == pytest.approx(1.0)
    assert slowed_by(0.006, 0.004, 1.2) == pytest.approx(0.5)
    assert slowed_by(0.0041, 0.004, 0.0) == pytest.approx(0.25)
    assert slowed_by(0.003, 0.004, 0.5) == 0.0
