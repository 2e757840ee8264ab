"""Choices of an engine that vLLM would refuse late, or take and not follow."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvasir.config.checks.kv_dtypes import REFUSED, SERVED
from kvasir.config.load.support import unsupported_features
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, SpeculativeSpec
from kvasir.core.requests import Role


@pytest.mark.parametrize("name", SERVED)
def test_a_kv_dtype_that_is_served_is_taken(name: Any) -> None:
    assert EngineSpec(kv_dtype=name).kv_dtype == name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("int8_per_token_head", "kernels for it on GPUs only; use fp8"),
        ("turboquant_3bit_nc", "Kvasir has not been run with it"),
        ("bfloat16", "leave kv_dtype out, or set model.dtype"),
        ("fp8_ds_mla", "by itself for models with sparse attention; use fp8"),
        ("fp8_e3m4", "choose fp8_e5m2 or fp8_e4m3"),
        (8, "unknown KV dtype 8"),
    ],
)
def test_a_kv_dtype_that_is_not_served_is_refused_with_a_reason(name: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        EngineSpec(kv_dtype=name)


def test_every_refused_kv_dtype_says_what_to_do() -> None:
    assert all("use fp8" in reason or "leave kv_dtype out" in reason for reason in REFUSED.values())


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(2, 4)], "the first entry has batch: 1"),
        ([(1, 4), (8, 2), (8, 1)], "a larger batch than the one before"),
        ([(1, 3), (8, 2)], "its largest number of tokens must be tokens, which is 4"),
        ([(1, 5)], "its largest number of tokens must be tokens, which is 4"),
    ],
)
def test_a_schedule_of_speculation_covers_each_batch_once(steps: list[tuple[int, int]], told: str) -> None:
    schedule = [{"batch": batch, "tokens": tokens} for batch, tokens in steps]
    with pytest.raises(ValidationError, match=told):
        SpeculativeSpec.model_validate({"tokens": 4, "schedule": schedule})


def test_data_parallel_ranks_cannot_follow_a_schedule() -> None:
    schedule = [{"batch": 1, "tokens": 4}, {"batch": 8, "tokens": 0}]
    spec = SpeculativeSpec.model_validate({"schedule": schedule})

    def problems(ranks: int) -> list[str]:
        engine = EngineSpec(speculative=spec, data_parallel_size=ranks)
        pool = PoolSpec(name="all", role=Role.BOTH, gpus=ranks, engine=engine)
        deployment = Deployment(disaggregation="never", pools=(pool,))
        return unsupported_features(deployment, platform="cuda")

    assert problems(1) == []
    (told,) = problems(2)
    assert "pools.all.engine.speculative.schedule: data-parallel ranks" in told
