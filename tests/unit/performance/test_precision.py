"""Weights are read in the precision in which they are stored, and computed in one that the device has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.requests import Role
from kvasir.hardware.gpus import gpu_named
from kvasir.performance.device import Device, device_of
from kvasir.performance.engines import engine_model, engine_of
from kvasir.performance.precision import precision_of
from kvasir.performance.work import model_work
from kvasir.sizing.fit import ModelFiles, model_files
from kvasir.sizing.shape import EngineShape


def _device(name: str) -> Device:
    gpu = gpu_named(name)
    assert gpu is not None
    return device_of(gpu)


def _stated(values: dict[str, Any], device: str, shape: EngineShape | None = None) -> tuple[float, str]:
    config = models.config_of(values)
    found = precision_of(config, model_work(config), shape or EngineShape(), _device(device))
    return found.weight_bytes, found.compute_dtype


_AWQ = models.LLAMA_70B | {"quantization_config": {"quant_method": "awq", "bits": 4}}
_FP8 = models.LLAMA_70B | {"quantization_config": {"quant_method": "fp8"}}
_W4A16 = models.LLAMA_70B | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": None}},
    }
}


def test_weights_of_four_bits_are_computed_in_sixteen() -> None:
    assert _stated(_AWQ, "H100") == (4.5 / 8, "bfloat16")
    assert _stated(_W4A16, "H100") == (4.5 / 8, "bfloat16")


def test_fp8_is_computed_in_fp8_where_the_device_has_units_for_it() -> None:
    assert _stated(_FP8, "H100") == (1.0, "fp8")
    assert _stated(_FP8, "A100") == (1.0, "bfloat16")
    assert _stated(models.LLAMA_70B, "H100", EngineShape(quantization="fp8")) == (1.0, "fp8")


def test_mxfp4_on_hopper_is_read_in_four_bits_and_computed_in_sixteen() -> None:
    files = model_files(models.config_of(models.GPT_OSS_120B), models.tensors_of(models.GPT_OSS_120B))
    engine = engine_model(files, _device("H100"), EngineShape())
    assert engine.compute_dtype == "bfloat16"
    # vLLM pads the experts' dimensions from 2,880 to 3,072 and 2,944.
    assert engine.expert_bytes == pytest.approx(4.25 / 8 * 3072 / 2880 * 2944 / 2880, rel=0.03)
    assert engine.weight_bytes == pytest.approx(2.0, rel=0.01)


def test_the_bytes_of_a_parameter_come_from_the_headers_of_the_checkpoint() -> None:
    files = model_files(models.config_of(models.DEEPSEEK_V3), models.tensors_of(models.DEEPSEEK_V3))
    engine = engine_model(files, _device("H200"), EngineShape(tensor=8))
    assert engine.expert_bytes == pytest.approx(1.0, rel=0.01)
    assert 1.0 < engine.weight_bytes < 1.2
    assert engine.compute_dtype == "fp8"
    plain = ModelFiles(models.config_of(models.LLAMA_8B), ())
    assert engine_model(plain, _device("H100"), EngineShape()).weight_bytes == 2.0


_IDENTITY = WorkerIdentity(
    worker_id="w", epoch=1, pool="serve", role=Role.BOTH, model="m", revision="", tokenizer_digest="",
    max_model_len=8192,
    kv=KvLayout(
        block_size=16, dtype="bfloat16", layout="", layers=32, kv_heads=8, head_size=128,
        bytes_per_block=16 * 131_072,
    ),
    kv_blocks=1000, engine="vllm", engine_version="1",
    hardware=Hardware("NVIDIA H100 80GB HBM3", 1, 989e12, 3.35e12),
    model_parameters=8_030_000_000, model_bytes=16_060_000_000,
)  # fmt: skip


def test_a_worker_s_identity_gives_about_the_engine_that_its_files_give() -> None:
    reported = engine_of(_IDENTITY)
    assert reported is not None
    files = ModelFiles(models.config_of(models.LLAMA_8B), ())
    counted = engine_model(files, _device("H100"), EngineShape())
    assert reported.prefill_s(4000) == pytest.approx(counted.prefill_s(4000), rel=0.15)
    assert reported.decode(16, 2000).seconds == pytest.approx(counted.decode(16, 2000).seconds, rel=0.15)
    assert reported.kv_token_bytes() == 131_072


def test_a_worker_that_reports_its_work_has_the_engine_of_its_files() -> None:
    files = ModelFiles(models.config_of(models.LLAMA_8B), ())
    reported = engine_of(replace(_IDENTITY, work=model_work(files.config)))
    assert reported is not None
    counted = engine_model(files, _device("H100"), EngineShape())
    assert reported.prefill_s(4000) == pytest.approx(counted.prefill_s(4000), rel=0.001)


def test_fp8_kv_of_a_worker_is_counted_in_bytes() -> None:
    halved = replace(_IDENTITY.kv, dtype="fp8_e4m3", bytes_per_block=16 * 65_536)
    reported = engine_of(replace(_IDENTITY, kv=halved))
    assert reported is not None
    assert reported.kv_token_bytes() == 65_536


def test_a_worker_that_reports_no_model_has_no_engine() -> None:
    assert engine_of(replace(_IDENTITY, model_parameters=0)) is None


def test_the_rates_that_a_worker_reports_count_for_a_device_that_is_in_no_catalogue() -> None:
    listed = engine_of(_IDENTITY)
    own = engine_of(replace(_IDENTITY, hardware=replace(_IDENTITY.hardware, device="in-house accelerator")))
    assert listed is not None
    assert own is not None
    assert own.prefill_s(4000) == pytest.approx(listed.prefill_s(4000), rel=0.001)
    assert own.decode(16, 2000).seconds == pytest.approx(listed.decode(16, 2000).seconds, rel=0.001)
