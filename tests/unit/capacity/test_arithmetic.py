"""The arithmetic of plans agrees with worked examples that are public, and with formulas in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvasir.hardware.offers import OfferedGpu, catalogue
from kvasir.performance.coefficients import NOMINAL
from kvasir.performance.step import accepted_tokens
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.analysis.arithmetic import arithmetic
from kvasir_platform.capacity.engines import (
    EngineOption,
    HardwareChoice,
    cpu_choice,
    engine_option,
    gpu_choice,
)
from kvasir_platform.capacity.models import PlannedModel, known_model
from kvasir_platform.capacity.pools import Mode, ServiceTarget
from kvasir_platform.capacity.queueing import erlang_c, wait_of
from kvasir_platform.capacity.search import PlanRequest, search
from kvasir_platform.capacity.traffic import (
    HOURS,
    LengthSpread,
    RequestLengths,
    observed_traffic,
    stated_traffic,
)

GIB = 1 << 30


def offered(name: str) -> OfferedGpu:
    return next(each for each in catalogue() if each.name == name)


def model(name: str) -> PlannedModel:
    found = known_model(name)
    assert found is not None
    return found


def option(name: str, gpu: str = "H100", **shape: object) -> EngineOption:
    made = replace(EngineShape(), **shape)  # type: ignore[arg-type]
    return engine_option(model(name), gpu_choice(offered(gpu)), made)


def test_a_token_of_a_70b_model_keeps_327_680_bytes_and_4096_of_them_1_34_gb() -> None:
    engine = option("llama-3.1-70b", tensor=4).engine
    assert engine.kv_token_bytes() == 327_680
    assert engine.context_bytes(4096) / 1e9 == pytest.approx(1.34, abs=0.005)


def test_the_same_model_with_a_kv_head_for_each_query_head_keeps_10_74_gb() -> None:
    engine = option("llama-3.1-70b", tensor=4).engine
    (attention,) = engine.work.attention
    whole = replace(engine.work, attention=(replace(attention, elements=2.0 * 64 * 128),))
    assert replace(engine, work=whole).context_bytes(4096) / 1e9 == pytest.approx(10.74, abs=0.005)


def test_four_h100_read_70_billion_parameters_of_16_bits_at_most_95_7_times_a_second() -> None:
    engine = replace(option("llama-3.1-70b", tensor=4).engine, coefficients=NOMINAL)
    work = replace(engine.work, dense=70e9, head=0.0, embedding=0.0)
    step = replace(engine, work=work, weight_bytes=2.0).decode(1, 0)
    assert 1 / step.memory_s == pytest.approx(95.7, abs=0.05)


def test_an_h100_has_its_ridge_at_295() -> None:
    assert option("llama-3.1-8b").engine.device.ridge("bfloat16") == pytest.approx(295, abs=0.5)


def test_five_proposals_of_which_eight_in_ten_are_accepted_give_3_69_tokens() -> None:
    assert accepted_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)


def test_70_billion_parameters_of_8_bits_and_8192_tokens_of_kv_take_67_69_gib() -> None:
    kv = option("llama-3.1-70b", tensor=4).engine.context_bytes(8192)
    assert (70e9 * 1 + kv) / GIB == pytest.approx(67.69, abs=0.005)


def test_a_70b_model_in_16_bits_does_not_fit_on_one_h100_and_does_on_four() -> None:
    assert not option("llama-3.1-70b").fits
    assert option("llama-3.1-70b", tensor=4).fits


def test_fp8_kv_has_room_for_twice_the_users_and_twice_the_context() -> None:
    half, fp8 = option("llama-3.1-8b"), option("llama-3.1-8b", kv_dtype="fp8")
    assert fp8.requests(8000) == pytest.approx(2 * half.requests(8000), rel=0.01)
    few = replace(half, model=model("llama-3.1-8b"))
    assert few.requests(few.longest_context(8)) >= 8
    assert few.requests(few.longest_context(8) + 64) < 8


def test_ranks_beyond_those_that_nvlink_joins_exchange_over_pcie() -> None:
    assert gpu_choice(offered("H100")).link_name(8) == "NVLink"
    assert gpu_choice(offered("H100-PCIe")).link_name(2) == "NVLink"
    assert gpu_choice(offered("H100-PCIe")).link_name(4) == "PCIe"
    assert gpu_choice(offered("H100")).link_name(16) == "network"
    bridged = [option("llama-3.1-70b", "H100-PCIe", tensor=size).engine.device for size in (2, 4)]
    assert [each.link_bytes_per_s for each in bridged] == [300e9, 64e9]


def test_mxfp4_is_read_in_4_bits_and_computed_in_16_on_hopper() -> None:
    engine = option("gpt-oss-120b").engine
    assert engine.compute_dtype == "bfloat16"
    assert engine.expert_bytes < 0.6


def test_cpu_cores_add_up() -> None:
    cores: HardwareChoice = cpu_choice()
    one, four = (engine_option(model("llama-3.1-8b"), cores, EngineShape(), cores=n) for n in (1, 4))
    assert four.engine.device.bytes_per_s == 4 * one.engine.device.bytes_per_s
    assert four.devices == 4
    assert four.dollars_per_hour == pytest.approx(4 * one.dollars_per_hour)


@pytest.mark.parametrize(
    ("servers", "offered_load", "chance"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.409)]
)
def test_the_chance_of_a_wait_is_erlang_s(servers: int, offered_load: float, chance: float) -> None:
    assert erlang_c(servers, offered_load) == pytest.approx(chance, abs=0.001)


def test_the_wait_of_one_server_is_pollaczek_s_and_overload_has_none() -> None:
    wait = wait_of(1, rate=8.0, service_s=0.1, service_variation=1.0, arrival_variation=1.0)
    assert wait.chance * wait.mean_s == pytest.approx(0.8 / (1 - 0.8) * 0.1)
    fixed = wait_of(1, rate=8.0, service_s=0.1, service_variation=0.0, arrival_variation=1.0)
    assert fixed.chance * fixed.mean_s == pytest.approx(0.8 / (1 - 0.8) * 0.1 / 2)
    assert math.isinf(wait_of(2, 30.0, 0.1, 1.0, 1.0).mean_s)


@pytest.mark.parametrize("peak", [10.0, 15.0, 30.0, 100.0])
def test_a_day_has_the_mean_and_the_peak_that_are_stated(peak: float) -> None:
    lengths = LengthSpread(100, 100)
    traffic = stated_traffic(rate=10, peak=peak, prompt=lengths, output=lengths, prefix_share=0)
    hours = traffic.hourly()
    assert len(hours) == HOURS
    assert sum(hours) / HOURS == pytest.approx(10)
    assert max(hours) == pytest.approx(peak, rel=1e-3)


def test_a_lognormal_length_has_its_median_and_its_95th_percentile() -> None:
    values = LengthSpread(1000, 4000).quantiles()
    assert values[15] < 1000 < values[16]
    assert values[29] < 4000 < values[30]


def test_a_trace_gives_its_rate_its_peak_and_its_burstiness() -> None:
    steady = [at / 10 for at in range(6000)]
    burst = [*steady, *(600 + at / 40 for at in range(2400))]
    lengths = [RequestLengths(100, 20, 10)] * len(burst)
    traffic = observed_traffic("t", burst, lengths)
    assert traffic.rate == pytest.approx(8400 / 660, rel=0.01)
    assert traffic.peak == pytest.approx(40, rel=0.1)
    assert traffic.burstiness == pytest.approx(0.1)
    assert (traffic.prompt, traffic.computed, traffic.output) == (100, 80, 10)


def test_the_explanation_writes_out_the_ceiling_of_bandwidth_and_what_grouped_queries_save() -> None:
    lengths = LengthSpread(4000, 4000)
    traffic = stated_traffic(rate=1, peak=2, prompt=lengths, output=LengthSpread(193, 193), prefix_share=0)
    target, hardware = ServiceTarget(2.0, 0.025, 0.95), (gpu_choice(offered("H100")),)
    request = PlanRequest(model("llama-3.1-70b"), hardware, traffic, target, 8192, modes=(Mode.AGGREGATED,))
    plan = next(each for each in search(request).plans if each.pools[0].engine.option.layout == "TP 4")
    lines = arithmetic(plan, request)
    # 69.5 billion parameters: the table of embeddings is not read.
    ceiling = (
        "bandwidth: 139.0 GB of weights / (4 x 3.35 TB/s) = 10.37 ms: at most 96.4 tokens/s for one stream"
    )
    assert ceiling in lines
    (kv,) = (line for line in lines if line.startswith("KV heads: "))
    assert kv == (
        "KV heads: 8 for 64 query heads (GQA); with one for each (MHA) 2,621,440 bytes a token, and 10.74 GB"
    )


def test_a_model_without_grouped_queries_has_no_line_of_what_they_save() -> None:
    lengths = LengthSpread(1000, 1000)
    traffic = stated_traffic(rate=1, peak=2, prompt=lengths, output=lengths, prefix_share=0)
    for name in ("llama-2-7b", "deepseek-v3"):
        target = ServiceTarget(2.0, 0.05, 0.95)
        request = PlanRequest(model(name), (gpu_choice(offered("H200")),), traffic, target, 4096)
        best = search(request).best
        assert best is not None
        assert not [line for line in arithmetic(best, request) if line.startswith("KV heads")]
