"""Parameters, operations and bytes counted from config.json agree with what is published of the models."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.hardware.gpus import gpu_named
from kvasir.performance.device import device_of
from kvasir.performance.step import EngineModel, Limit, accepted_tokens
from kvasir.performance.work import model_work
from kvasir.sizing.shape import EngineShape


@pytest.mark.parametrize(
    ("values", "billions"),
    [
        (models.LLAMA_8B, 8.03),
        (models.LLAMA_70B, 70.55),
        (models.LLAMA_405B, 405.9),
        (models.QWEN3_8B, 8.19),
        (models.DEEPSEEK_V3, 671.0),
    ],
    ids=["llama-8b", "llama-70b", "llama-405b", "qwen3-8b", "deepseek-v3"],
)
def test_the_parameters_counted_are_those_published(values: dict[str, Any], billions: float) -> None:
    work = model_work(models.config_of(values))
    assert work.parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_a_token_of_deepseek_v3_uses_37_billion_parameters() -> None:
    work = model_work(models.config_of(models.DEEPSEEK_V3))
    assert work.active + work.head + work.embedding == pytest.approx(37e9, rel=0.03)


def test_a_token_of_a_70b_model_with_grouped_queries_has_327_680_bytes_of_kv() -> None:
    work = model_work(models.config_of(models.LLAMA_70B))
    assert 2 * work.kv_elements(1.0) == 327_680


def test_an_h100_has_its_ridge_at_295_operations_per_byte() -> None:
    gpu = gpu_named("H100")
    assert gpu is not None
    assert device_of(gpu).ridge("bfloat16") == pytest.approx(295, abs=1)


def test_decoding_one_stream_is_limited_by_memory_and_a_long_prompt_by_arithmetic() -> None:
    gpu = gpu_named("H100")
    assert gpu is not None
    engine = EngineModel(model_work(models.config_of(models.LLAMA_8B)), device_of(gpu), EngineShape())
    assert engine.decode(1, 1000).limit is Limit.MEMORY
    assert engine.prefill_s(8000) > 4 * engine.decode(1, 1000).seconds


def test_four_proposals_of_which_eight_in_ten_are_accepted_give_3_36_tokens() -> None:
    assert accepted_tokens(0.8, 4) == pytest.approx(3.3616)
    assert accepted_tokens(1.0, 4) == 5.0
