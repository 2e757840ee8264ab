"""Weights of each rank, for public models whose sizes are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.checkpoint.tensors import TensorHeader
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import rank_weights, weight_parts

GIB = 1 << 30


def held_of(values: dict[str, Any], tensors: Iterable[TensorHeader], **shape: Any) -> tuple[int, ...]:
    """Return the bytes of weights on a rank of each stage."""
    config = models.config_of(values)
    return rank_weights(config, weight_parts(config, tensors), EngineShape(**shape))


def gib(values: dict[str, Any], **shape: Any) -> list[float]:
    """Return the GiB of weights on a rank of each stage."""
    return [each / GIB for each in held_of(values, models.tensors_of(values), **shape)]


@pytest.mark.parametrize(
    ("values", "billions"),
    [
        (models.LLAMA_8B, 8.03),
        (models.LLAMA_70B, 70.55),
        (models.QWEN3_30B, 30.53),
        # 27.4 B with the vision tower, which has 0.42 B.
        (models.GEMMA3_27B, 27.01),
    ],
)
def test_weights_in_bfloat16_are_two_bytes_of_each_published_parameter(
    values: dict[str, Any], billions: float
) -> None:
    assert gib(values)[0] * GIB == pytest.approx(2e9 * billions, rel=0.002)


def test_deepseek_has_a_byte_of_each_of_its_671_billion_and_leaves_the_predictor_out() -> None:
    assert gib(models.DEEPSEEK_V3)[0] * GIB == pytest.approx(671e9, rel=0.01)


def test_mxfp4_experts_are_padded_as_vllm_pads_them() -> None:
    # vLLM logs "Model loading took 65.9651 GiB" on one H100 (its issue 23278).
    assert gib(models.GPT_OSS_120B)[0] == pytest.approx(65.97, rel=0.01)


def test_linear_layers_and_the_vocabulary_are_divided_among_ranks() -> None:
    assert gib(models.LLAMA_70B, tensor=4)[0] == pytest.approx(gib(models.LLAMA_70B)[0] / 4, rel=0.001)


def test_keys_and_values_are_repeated_where_ranks_outnumber_their_heads() -> None:
    extra = 80 * 2 * 8192 * 8 * 128 * 2 * (1 / 8 - 1 / 16) / GIB
    assert gib(models.LLAMA_70B, tensor=16)[0] - gib(models.LLAMA_70B)[0] / 16 == pytest.approx(
        extra, rel=0.02
    )


def test_each_stage_holds_its_layers_and_an_end_of_the_model() -> None:
    first, second = gib(models.LLAMA_8B, pipeline=2)
    assert first == pytest.approx(second, rel=0.001)
    assert first + second == pytest.approx(gib(models.LLAMA_8B)[0])


def test_tied_embeddings_are_held_by_both_ends() -> None:
    first, last = gib(models.GEMMA3_27B, pipeline=2)
    embedding = 262208 * 5376 * 2 / GIB
    assert first + last == pytest.approx(gib(models.GEMMA3_27B)[0] + embedding)


def test_a_head_beside_tied_embeddings_is_not_loaded() -> None:
    tied, tensors = models.LLAMA_8B | {"tie_word_embeddings": True}, models.tensors_of(models.LLAMA_8B)
    assert held_of(tied, tensors)[0] == held_of(models.LLAMA_8B, tensors)[0] - 128256 * 4096 * 2


@pytest.mark.parametrize("expert_parallel", [True, False])
def test_experts_are_divided_among_tensor_and_data_ranks(expert_parallel: bool) -> None:
    experts = 48 * 128 * 3 * 2048 * 768 * 2 / GIB
    rest = gib(models.QWEN3_30B)[0] - experts
    held = gib(models.QWEN3_30B, tensor=2, data=4, expert_parallel=expert_parallel)[0]
    assert held == pytest.approx(experts / 8 + rest / 2, rel=0.01)


def test_whole_experts_leave_some_ranks_with_one_more() -> None:
    three = gib(models.QWEN3_30B, data=3, expert_parallel=True)[0]
    parts = gib(models.QWEN3_30B, data=3)[0]
    assert three - parts == pytest.approx(48 * (43 - 128 / 3) * 3 * 2048 * 768 * 2 / GIB)


def test_float32_doubles_them_and_quantizing_at_load_halves_linear_layers() -> None:
    plain = gib(models.LLAMA_8B)[0]
    ends = 2 * 128256 * 4096 * 2 / GIB
    assert gib(models.LLAMA_8B, dtype="float32")[0] == pytest.approx(2 * plain)
    assert gib(models.LLAMA_8B, quantization="int8")[0] == pytest.approx((plain - ends) / 2 + ends, rel=0.001)


def test_a_float32_checkpoint_is_served_in_16_bits() -> None:
    tensors = [TensorHeader("model.layers.0.mlp.up_proj.weight", "F32", (8, 4), 128, "a")]
    assert held_of(models.LLAMA_8B, tensors) == (64,)


def test_what_is_quantized_in_the_checkpoint_is_held_as_stored() -> None:
    values = models.LLAMA_8B | {"quantization_config": {"quant_method": "awq"}}
    tensors = [
        TensorHeader("model.layers.0.mlp.up_proj.qweight", "I32", (4096, 1792), 4096 * 1792 * 4, "a"),
        TensorHeader("model.layers.0.mlp.up_proj.scales", "F16", (32, 14336), 32 * 14336 * 2, "a"),
    ]
    held = held_of(values, tensors, dtype="float32", tensor=2)
    assert held == (sum(each.nbytes for each in tensors) // 2,)
