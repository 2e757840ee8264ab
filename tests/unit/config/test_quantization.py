"""Whether a quantization method fits a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.config.checks.quantization import declared_method, quantization_problem


@pytest.mark.parametrize(
    ("stated", "method"),
    [
        (None, ""),
        ({"quant_method": "AWQ"}, "awq"),
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
