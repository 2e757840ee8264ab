"""Whether public models fit on GPUs, with the arithmetic and the changes that make them fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.hardware.gpus import Gpu, gpu_named
from kvasir.sizing.fit import Fit, ModelFiles, RankMemory, fit, model_files, need_of
from kvasir.sizing.remedies import Attempt, fitting_gpus, remedies
from kvasir.sizing.report import describe
from kvasir.sizing.shape import EngineShape

GIB = 1 << 30


def gpu(name: str) -> Gpu:
    found = gpu_named(name)
    assert found is not None
    return found


_MADE: dict[str, ModelFiles] = {}


def files(values: dict[str, Any]) -> ModelFiles:
    key = str(values)
    if key not in _MADE:
        _MADE[key] = model_files(models.config_of(values), models.tensors_of(values))
    return _MADE[key]


def on(name: str, values: dict[str, Any], *, utilization: float = 0.9, **shape: Any) -> Fit:
    """Return how a model fits on a GPU."""
    need = need_of(files(values), EngineShape(**shape))
    return fit(need, RankMemory(gpu(name).memory_bytes, utilization))


def changes(
    name: str, values: dict[str, Any], *, kv_bytes: int | None = None, nodes: int = 1, **shape: Any
) -> list[str]:
    memory = RankMemory(gpu(name).memory_bytes, 0.9, kv_bytes)
    return remedies(Attempt(files(values), EngineShape(**shape), memory, gpu(name), 1.0, nodes))


@pytest.mark.parametrize("moves_kv", [True, False])
@pytest.mark.parametrize(
    ("values", "least_tokens"),
    [(models.LLAMA_8B, 440_000), (models.QWEN3_30B, 130_000), (models.GPT_OSS_120B, 50_000)],
)
def test_on_an_h100_these_start_with_every_default(
    values: dict[str, Any], least_tokens: int, moves_kv: bool
) -> None:
    found = on("H100", values, keeps_windows=not moves_kv)
    assert found.missing == 0
    assert found.tokens > least_tokens


def test_8b_leaves_three_quarters_of_an_h100_for_kv() -> None:
    found = on("H100", models.LLAMA_8B)
    assert found.memory.budget == int(79.1 * GIB * 0.9)
    assert found.weights / GIB == pytest.approx(14.96, abs=0.01)
    assert found.free == found.memory.budget - found.weights - found.working.total
    assert found.tokens == pytest.approx(found.free / (128 << 10), rel=0.001)
    assert found.requests == pytest.approx(found.tokens / 4096, rel=0.001)


def test_70b_does_not_fit_on_one_h100_and_says_so_with_the_arithmetic() -> None:
    need = need_of(files(models.LLAMA_70B), EngineShape())
    found = fit(need, RankMemory(gpu("H100").memory_bytes, 0.9))
    assert describe(found, need, "H100") == (
        "does not fit on H100 by 63.0 GiB: 71.2 GiB (0.9 of 79.1) - (131.4 weights + 0.6 activations + 0.6 "
        "CUDA graphs + 0.3 libraries) = -61.8 GiB for KV, and one request of 4,096 tokens needs 1.25 GiB"
    )
    assert changes("H100", models.LLAMA_70B) == [
        "set engine.tensor_parallel_size: 2 and gpus: 2",
        "set model.quantization: fp8",
        "use B200 or GB200",
    ]


def test_70b_fits_on_four_h100() -> None:
    need = need_of(files(models.LLAMA_70B), EngineShape(tensor=4))
    found = fit(need, RankMemory(gpu("H100").memory_bytes, 0.9))
    assert found.missing == 0
    assert describe(found, need, "H100") == (
        "fits on H100: 71.2 GiB (0.9 of 79.1) = 32.9 weights + 0.4 activations + 0.6 CUDA graphs + 1.0 "
        "libraries + 36.4 left for KV: 476,544 tokens, 116.3 requests of 4,096"
    )


@pytest.mark.parametrize(
    ("name", "tensor", "fits"), [("H100", 8, False), ("H200", 8, True), ("H100", 16, True)]
)
def test_deepseek_v3_needs_eight_h200_or_sixteen_h100(name: str, tensor: int, fits: bool) -> None:
    assert (on(name, models.DEEPSEEK_V3, tensor=tensor).missing == 0) is fits


def test_deepseek_v3_with_whole_experts_on_data_parallel_ranks() -> None:
    spread = on("H200", models.DEEPSEEK_V3, data=8, expert_parallel=True)
    assert spread.missing == 0
    # Attention and the vocabulary are whole on each of these ranks.
    assert spread.weights > on("H200", models.DEEPSEEK_V3, tensor=8).weights


def test_deepseek_v3_over_two_nodes_of_eight_h200_has_whole_experts_and_attention_on_each() -> None:
    spread = on("H200", models.DEEPSEEK_V3, data=16, expert_parallel=True)
    assert spread.missing == 0
    # In FP8 a byte for each number, and scales.
    expert = 3 * 7168 * 2048
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    whole = 61 * attention + 3 * 3 * 7168 * 18432 + 58 * expert + 2 * 2 * 129280 * 7168
    assert spread.weights == pytest.approx(58 * 16 * expert + whole, rel=0.01)
    # Two copies more on each GPU, in each of 58 layers.
    copied = on("H200", models.DEEPSEEK_V3, data=16, expert_parallel=True, redundant_experts=32)
    assert copied.weights - spread.weights == pytest.approx(58 * 2 * expert, rel=0.01)
    assert copied.missing == 0


def test_gemma_s_windows_leave_room_for_more_requests_while_no_kv_is_moved() -> None:
    moved, kept = (
        on("H100", models.GEMMA3_27B, max_model_len=32768, keeps_windows=each) for each in (False, True)
    )
    assert moved.missing == kept.missing == 0
    assert kept.requests > 2 * moved.requests


def test_a_long_context_is_shortened_to_what_fits() -> None:
    first = changes("L4", models.LLAMA_8B, max_model_len=131072)[0]
    length = int(first.removeprefix("set model.max_model_len to ").removesuffix(" or less"))
    assert on("L4", models.LLAMA_8B, max_model_len=length).missing == 0
    assert on("L4", models.LLAMA_8B, max_model_len=length + 32).missing > 0


def test_fp8_kv_is_proposed_where_it_is_enough() -> None:
    longest = 2 * 28704 - 4096
    assert "set engine.kv_dtype: fp8" in changes("L4", models.LLAMA_8B, max_model_len=longest)


def test_every_proposed_size_makes_it_fit() -> None:
    assert on("H100", models.LLAMA_70B, tensor=2).missing == 0
    assert on("H100", models.LLAMA_70B, quantization="fp8").missing == 0
    assert on("B200", models.LLAMA_70B).missing == 0


def test_gpus_are_proposed_for_each_node() -> None:
    assert "set engine.tensor_parallel_size: 16 and gpus: 16" in changes("H100", models.DEEPSEEK_V3, tensor=8)
    spread = changes("H100", models.DEEPSEEK_V3, tensor=8, nodes=2)
    assert "set engine.tensor_parallel_size: 16 and gpus: 8" in spread


def test_the_named_tensor_size_divides_the_heads() -> None:
    odd = models.LLAMA_70B | {"num_attention_heads": 72, "num_key_value_heads": 9, "head_dim": 128}
    assert "set engine.tensor_parallel_size: 8 and gpus: 8" not in changes("L40S", odd)
    assert "set engine.tensor_parallel_size: 4 and gpus: 4" in changes("L40S", odd, dtype="bfloat16")


def test_explicit_bytes_of_kv_must_fit_beside_all_else_and_hold_a_request() -> None:
    need = need_of(files(models.LLAMA_8B), EngineShape())
    total = gpu("H100").memory_bytes
    small, large, good = (fit(need, RankMemory(total, 0.9, each * GIB // 4)) for each in (1, 4 * 70, 4 * 40))
    assert small.missing == GIB // 4
    assert large.missing == 70 * GIB - large.free
    assert good.missing == 0
    assert good.tokens == 40 * 8 * 1024
    assert changes("H100", models.LLAMA_8B, kv_bytes=GIB // 4)[0] == "leave engine.kv_cache_bytes out"


def test_a_share_of_a_gpu_is_less_than_the_whole() -> None:
    assert on("L4", models.LLAMA_8B).missing == 0
    assert on("L4", models.LLAMA_8B, utilization=0.45).missing > 0


def test_without_a_gpu_those_that_would_do_are_named() -> None:
    need = need_of(files(models.LLAMA_8B), EngineShape())
    assert fitting_gpus(need, RankMemory(0, 0.9)) == ["L4", "A10G", "A10"]


def test_the_tensors_of_the_largest_model_are_read_once_and_summed() -> None:
    tensors = models.tensors_of(models.DEEPSEEK_V3)
    assert len(tensors) > 90_000
    assert len(files(models.DEEPSEEK_V3).weights) < 200


_PAGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3.1-8B": (models.LLAMA_8B, {}),
    "Qwen3-30B-A3B": (models.QWEN3_30B, {}),
    "gpt-oss-120b": (models.GPT_OSS_120B, {}),
    "Gemma-3-27B": (models.GEMMA3_27B, {"keeps_windows": False}),
    "Llama-3.1-70B": (models.LLAMA_70B, {"tensor": 4}),
    "DeepSeek-V3": (models.DEEPSEEK_V3, {"tensor": 16}),
}


@pytest.mark.parametrize("name", _PAGE)
def test_the_page_on_sizing_states_what_the_arithmetic_gives(name: str) -> None:
    values, shape = _PAGE[name]
    found = on("H100", values, **shape)
    page = (Path(__file__).parents[3] / "docs" / "SIZING.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {name}, "))
    assert f"| {found.weights / GIB:.1f} GiB" in row
    assert f"| {found.free / GIB:.1f} GiB" in row
    assert f"| {found.tokens:,} |" in row
