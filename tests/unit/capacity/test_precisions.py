"""Plans have weights in the precisions that the hardware computes and that workers can serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.core.errors import ConfigError
from kvasir.hardware.offers import catalogue
from kvasir_platform.capacity.analysis.batches import batch_rows
from kvasir_platform.capacity.analysis.optimisations import optimisations
from kvasir_platform.capacity.engines import HardwareChoice, PrecisionChoice, cpu_choice, gpu_choice
from kvasir_platform.capacity.models import PlannedModel, known_model
from kvasir_platform.capacity.pools import Mode, ServiceTarget
from kvasir_platform.capacity.precisions import computes_int8, int8_problem, precisions, precisions_on
from kvasir_platform.capacity.search import PlanRequest, search
from kvasir_platform.capacity.traffic import LengthSpread, stated_traffic


def model(name: str) -> PlannedModel:
    found = known_model(name)
    assert found is not None
    return found


def gpus(*names: str) -> tuple[HardwareChoice, ...]:
    known = {each.name: gpu_choice(each) for each in catalogue()}
    return tuple(known[name] for name in names)


def request(name: str, *hardware: str, quantization: str = "none") -> PlanRequest:
    lengths = LengthSpread(1000, 1000)
    traffic = stated_traffic(rate=8, peak=16, prompt=lengths, output=LengthSpread(250, 250), prefix_share=0)
    chosen = precisions(model(name), gpus(*hardware), quantization=quantization, kv_dtype="auto")
    return PlanRequest(
        model(name), gpus(*hardware), traffic, ServiceTarget(2.0, 0.05, 0.95), 2048, precisions=chosen
    )


def test_int8_is_computed_from_turing_to_hopper_and_on_cpus() -> None:
    found = {each.name for each in gpus("T4", "A10", "A100", "L4", "H100") if computes_int8(each)}
    assert found == {"T4", "A10", "A100", "L4", "H100"}
    assert not any(map(computes_int8, gpus("V100", "B200", "RTX-5090")))
    assert computes_int8(cpu_choice(4))


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        ("llama-3.1-8b", "", ""),
        ("qwen3-8b", "", ""),
        ("llama-3.1-8b", "s3://bucket/llama", "its weights are streamed"),
        ("gpt-oss-20b", "", "it is quantized already"),
        ("qwen3-30b-a3b", "", "only dense models"),
        ("gemma-3-27b", "", "only dense models"),
        ("bge-m3", "", "only dense models"),
    ],
)
def test_workers_quantize_dense_models_in_folders_to_int8(name: str, source: str, problem: str) -> None:
    found = model(name)
    assert problem in (said := int8_problem(replace(found, source=source or found.source)))
    assert bool(said) == bool(problem)


def test_any_compares_fp8_where_it_is_computed_and_int8_elsewhere() -> None:
    llama, (h100, a100, v100) = model("llama-3.1-8b"), gpus("H100", "A100", "V100")
    chosen = precisions(llama, (h100, a100, v100), quantization="any", kv_dtype="auto")
    assert [each.quantization for each in chosen] == ["none", "fp8", "int8"]
    compared = [
        [each.quantization for each in precisions_on(llama, kind, chosen)] for kind in (h100, a100, v100)
    ]
    assert compared == [["none", "fp8"], ["none", "int8"], ["none"]]
    stored = precisions(model("gpt-oss-20b"), (h100, a100), quantization="any", kv_dtype="auto")
    assert stored == (PrecisionChoice(),)


def test_int8_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="no int8 kernels for V100"):
        precisions(model("llama-3.1-8b"), gpus("A100", "V100"), quantization="int8", kv_dtype="auto")


def test_all_pools_of_a_plan_have_one_quantization() -> None:
    asked = replace(request("llama-3.1-8b", "H100", "A100", quantization="any"), modes=(Mode.DISAGGREGATED,))
    plans = search(asked).plans
    shapes = [{pool.engine.option.shape.quantization for pool in plan.pools} for plan in plans]
    assert shapes
    assert all(len(each) == 1 for each in shapes)


def test_int8_halves_the_weights_that_a_step_reads_and_keeps_the_rate_of_arithmetic() -> None:
    plain, quantized = (
        {row.batch: row for row in batch_rows(request("llama-3.1-8b", "A100")) if row.option.title == title}
        for title in ("1 x A100", "1 x A100, int8")
    )
    assert quantized[1].seconds < 0.65 * plain[1].seconds
    assert quantized[0].seconds == pytest.approx(plain[0].seconds, rel=0.01)


@pytest.mark.parametrize(
    ("hardware", "name", "reason"),
    [
        ("A100", "int8 weights", "$"),
        ("H100", "FP8 weights", "$"),
        ("V100-32GB", "FP8 weights", "computes no FP8; no int8 either: vLLM has no int8 kernels"),
    ],
)
def test_the_optimisation_of_weights_is_the_format_that_the_hardware_has(
    hardware: str, name: str, reason: str
) -> None:
    sheet = optimisations(search(request("llama-3.1-8b", hardware)))
    (found,) = (each for each in sheet if each.field.startswith("model.quantization"))
    assert found.name == name
    assert reason in found.reason
