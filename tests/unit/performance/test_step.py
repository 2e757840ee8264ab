"""The time of a step follows the roofline, and says which side limits it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.kit import public_models as models

from kvasir.hardware.gpus import gpu_named
from kvasir.performance.coefficients import NOMINAL
from kvasir.performance.device import Device, device_of
from kvasir.performance.step import EngineModel, Limit, PromptChunk, StepWork
from kvasir.performance.work import dense_work, model_work
from kvasir.sizing.shape import EngineShape


def _device(name: str) -> Device:
    gpu = gpu_named(name)
    assert gpu is not None
    return device_of(gpu)


_H100 = _device("H100")
_LLAMA_8B = EngineModel(model_work(models.config_of(models.LLAMA_8B)), _H100, EngineShape())


def test_an_h100_has_its_ridge_at_295_operations_per_byte() -> None:
    assert _H100.ridge("bfloat16") == pytest.approx(295, abs=1)


def test_four_h100_decode_one_stream_of_a_70b_model_with_at_most_95_7_tokens_a_second() -> None:
    work = dense_work(parameters=70e9, layers=80, hidden=8192, kv_elements=2048)
    engine = EngineModel(work, _H100, EngineShape(tensor=4), coefficients=NOMINAL)
    found = engine.decode(1, 0)
    assert 1 / found.memory_s == pytest.approx(95.7, abs=0.05)
    assert found.limit is Limit.MEMORY


def test_decoding_one_stream_is_limited_by_memory_and_a_long_prompt_by_arithmetic() -> None:
    assert _LLAMA_8B.decode(1, 1000).limit is Limit.MEMORY
    assert _LLAMA_8B.step(StepWork((PromptChunk(2048),))).limit is Limit.COMPUTE
    assert _LLAMA_8B.prefill_s(8000) > 4 * _LLAMA_8B.decode(1, 1000).seconds


def test_a_batch_reaches_the_ridge_where_arithmetic_begins_to_limit() -> None:
    engine = replace(_LLAMA_8B, coefficients=NOMINAL)
    below, above = engine.decode(250, 0), engine.decode(350, 0)
    assert (below.limit, above.limit) == (Limit.MEMORY, Limit.COMPUTE)


def test_decoding_has_about_one_operation_for_each_byte_and_stream_and_prompts_have_hundreds() -> None:
    assert _LLAMA_8B.intensity(StepWork(streams=1)) == pytest.approx(1.0, rel=0.01)
    assert _LLAMA_8B.intensity(StepWork(streams=64)) == pytest.approx(64.0, rel=0.01)
    # KV of long contexts is read for one stream only: four query heads share a KV head, two operations each.
    assert _LLAMA_8B.intensity(StepWork(streams=1000, context=1e6)) == pytest.approx(4.0, rel=0.05)
    assert _LLAMA_8B.intensity(StepWork((PromptChunk(2048),))) > _H100.ridge("bfloat16")


def test_a_cached_prefix_is_not_computed_but_attended_to() -> None:
    whole, cached, short = (_LLAMA_8B.prefill_s(*each) for each in ((4096, 0), (4096, 3072), (1024, 0)))
    assert short < cached < whole / 2


def test_a_mixed_step_takes_longer_than_either_part_and_less_than_both() -> None:
    prompts = StepWork((PromptChunk(512, 0),))
    streams = StepWork(streams=32, context=2000)
    both = StepWork(prompts.prompts, streams=32, context=2000)
    apart = [_LLAMA_8B.step(each).seconds for each in (prompts, streams)]
    assert max(apart) < _LLAMA_8B.step(both).seconds < sum(apart)


def test_an_empty_step_takes_no_time() -> None:
    assert _LLAMA_8B.step(StepWork()).seconds == 0.0


def test_ranks_beyond_the_kv_heads_read_copies() -> None:
    latent = EngineModel(model_work(models.config_of(models.DEEPSEEK_V3)), _H100, EngineShape())
    one = latent.decode(64, 8000).memory_s - latent.decode(64, 0).memory_s
    eight = replace(latent, shape=EngineShape(tensor=8))
    assert eight.decode(64, 8000).memory_s - eight.decode(64, 0).memory_s == pytest.approx(one)


def test_links_without_nvlink_make_tensor_parallelism_slower() -> None:
    work, shape = model_work(models.config_of(models.LLAMA_70B)), EngineShape(tensor=4)
    pcie = replace(_H100, link_bytes_per_s=32e9)
    step = StepWork((PromptChunk(2048),))
    near, far = (EngineModel(work, each, shape).step(step) for each in (_H100, pcie))
    assert far.communication_s > 5 * near.communication_s
    assert far.limit is Limit.COMMUNICATION


def test_moving_a_context_takes_its_bytes_over_the_rate_of_the_link() -> None:
    engine = EngineModel(model_work(models.config_of(models.LLAMA_70B)), _H100, EngineShape())
    assert engine.context_bytes(4096) == 4096 * 327_680
    assert engine.transfer_s(4096, 12.5e9, 0.003) == pytest.approx(0.003 + 4096 * 327_680 / 12.5e9)
    fp8 = replace(engine, shape=EngineShape(kv_dtype="fp8"))
    assert fp8.context_bytes(4096) == engine.context_bytes(4096) / 2
