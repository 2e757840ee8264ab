"""Whether a quantization method fits a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.config.checks.quantization import (
    declared_method,
    quantization_problem,
    reads_checkpoint,
)
from kvasir.config.load.loader import load
from kvasir.config.load.support import unsupported_features


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        (None, ""),
        ({"quant_method": "AWQ"}, "awq"),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        ({"producer": {"name": "modelopt"}, "quantization": {}}, "modelopt"),
        ({"bits": 4}, "unnamed"),
    ],
)
def test_a_checkpoint_declares_its_method(stated: dict[str, Any] | None, method: str) -> None:
    assert declared_method(stated) == method


@pytest.mark.parametrize(
    ("wanted", "declared"),
    [
        ("none", ""),
        ("none", "awq"),
        ("none", "unnamed"),
        ("int8", ""),
        ("fp8", ""),
        ("fp8", "fp8"),
        ("awq", "awq"),
        ("gptq_marlin", "gptq"),
        ("moe_wna16", "gptq"),
        ("inc", "auto-round"),
        ("quark", "quark"),
        ("compressed-tensors", "compressed-tensors"),
    ],
)
def test_a_method_that_reads_the_checkpoint_fits(wanted: str, declared: str) -> None:
    assert quantization_problem(wanted, declared) is None


@pytest.mark.parametrize(
    ("wanted", "declared", "why"),
    [
        ("awq", "", "those of the model are not quantized"),
        ("awq", "gptq", "quantized already, with gptq"),
        ("int8", "awq", "quantized already, with awq"),
        ("fp8_per_channel", "fp8", "quantized already, with fp8"),
        ("fp8", "unnamed", "quantized already, with unnamed"),
    ],
)
def test_any_other_is_refused_with_what_the_checkpoint_is(wanted: str, declared: str, why: str) -> None:
    problem = quantization_problem(wanted, declared)
    assert problem is not None
    assert why in problem[0]
    assert wanted in problem[0]
    assert "set none" in problem[1]


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "nvfp4_per_token"])
def test_a_method_without_a_kernel_on_cpus_is_refused_there_with_others_to_use(method: str) -> None:
    deployment = load(None, [f"model.quantization={method}"])
    found = [each for each in unsupported_features(deployment, platform="cpu") if "kernel" in each]
    assert found
    assert all(each.endswith("set fp8_per_channel or int8") for each in found)
    on_gpu = unsupported_features(deployment, platform="cuda")
    assert not [each for each in on_gpu if "kernel" in each]


def test_checkpoints_are_read_that_declare_a_method_of_vllm_or_none() -> None:
    for declared in ("", "unnamed", "awq", "auto-round", "compressed-tensors", "modelopt", "mxfp4"):
        assert reads_checkpoint(declared), declared
    for declared in ("bitsandbytes", "gguf", "aqlm", "hqq", "quanto", "fbgemm_fp8"):
        assert not reads_checkpoint(declared), declared
