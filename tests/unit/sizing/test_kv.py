"""KV bytes of each kind of layer, for public models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.sizing.kv import kv_need
from kvasir.sizing.shape import EngineShape

SHAPE = EngineShape()
WIDENED = EngineShape(keeps_windows=False)


def token_bytes(values: dict[str, Any], **changes: Any) -> float:
    """Return the KV bytes of a token of one request of max_model_len on one rank."""
    shape = dataclasses.replace(WIDENED, **changes)
    return kv_need(models.config_of(values), shape).request_bytes[0] / shape.max_model_len


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (models.LLAMA_8B, 32 * 2 * 8 * 128 * 2),
        (models.LLAMA_70B, 80 * 2 * 8 * 128 * 2),
        (models.QWEN3_30B, 48 * 2 * 4 * 128 * 2),
        (models.GPT_OSS_120B, 36 * 2 * 8 * 64 * 2),
        (models.DEEPSEEK_V3, 61 * (512 + 64) * 2),
        (models.GEMMA3_27B, 62 * 2 * 16 * 128 * 2),
    ],
)
def test_a_token_has_a_key_and_a_value_in_each_layer_or_one_latent(
    values: dict[str, Any], expected: int
) -> None:
    assert token_bytes(values) == expected


def test_fp8_halves_the_kv_of_a_token() -> None:
    assert token_bytes(models.LLAMA_8B, kv_dtype="fp8") == token_bytes(models.LLAMA_8B) / 2


def test_float32_doubles_it() -> None:
    assert token_bytes(models.LLAMA_8B, dtype="float32") == token_bytes(models.LLAMA_8B) * 2


@pytest.mark.parametrize(("tensor", "share"), [(2, 2), (8, 8), (16, 8)])
def test_heads_are_divided_among_ranks_and_repeated_when_there_are_fewer(tensor: int, share: int) -> None:
    assert token_bytes(models.LLAMA_8B, tensor=tensor) == token_bytes(models.LLAMA_8B) / share


def test_every_rank_keeps_the_whole_latent_of_mla() -> None:
    assert token_bytes(models.DEEPSEEK_V3, tensor=8) == token_bytes(models.DEEPSEEK_V3)


def test_pipeline_stages_keep_their_own_layers() -> None:
    need = kv_need(models.config_of(models.LLAMA_70B), EngineShape(pipeline=3))
    whole = kv_need(models.config_of(models.LLAMA_70B), SHAPE).block_bytes[0]
    assert [each * 80 // whole for each in need.block_bytes] == [27, 27, 26]


def test_layers_with_a_window_keep_only_the_window_unless_they_are_widened() -> None:
    config = models.config_of(models.GPT_OSS_120B)
    kept = kv_need(config, EngineShape(max_model_len=131072)).request_bytes[0]
    widened = kv_need(config, EngineShape(max_model_len=131072, keeps_windows=False)).request_bytes[0]
    page = 18 * 2 * 8 * 64 * 2 * 32
    # 128 - 1 tokens of the window and two steps in flight, in blocks of 32 that need not begin with it.
    window = -(-(127 + 2 * 2048) // 32) + 1
    assert kept == page * (131072 // 32 + window)
    assert widened == 36 * 2 * 8 * 64 * 2 * 131072


def test_gemma_s_52_layers_with_a_window_share_blocks_of_10_layers() -> None:
    need = kv_need(models.config_of(models.GEMMA3_27B), EngineShape(max_model_len=32768))
    window = -(-(1023 + 2 * 2048) // 32) + 1
    assert need.block_bytes == (10 * 2 * 16 * 128 * 2 * 32,)
    assert need.request_blocks == 32768 // 32 + 6 * window


def test_a_model_with_windows_in_all_layers_keeps_only_them_in_any_case() -> None:
    mistral = models.LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096}
    need = kv_need(models.config_of(mistral), dataclasses.replace(WIDENED, max_model_len=32768))
    assert need.request_blocks == -(-(4095 + 2 * 2048) // 32) + 1


def test_a_recurrent_state_does_not_grow_with_the_request() -> None:
    config = models.config_of(models.QWEN3_NEXT_80B)
    short, long = (kv_need(config, EngineShape(max_model_len=each)) for each in (8_192, 65_536))
    full = 2 * 2 * 256 * 2
    state = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2
    tokens = 32 * -(-state // (32 * full))
    assert short.block_bytes == (12 * tokens * full,)
    # 36 recurrent layers are three groups, and each keeps its current state and one at a block's end.
    assert long.request_blocks == -(-65_536 // tokens) + 3 * 2
    assert long.request_blocks - short.request_blocks == -(-65_536 // tokens) - -(-8_192 // tokens)


def test_a_mamba_state_is_divided_among_ranks() -> None:
    config = models.config_of(models.GRANITE4_SMALL)
    one, two = (kv_need(config, EngineShape(tensor=each)) for each in (1, 2))
    assert one.request_bytes[0] == pytest.approx(2 * two.request_bytes[0], rel=0.02)


def test_an_encoder_keeps_nothing() -> None:
    need = kv_need(models.config_of({"model_type": "bert", "num_hidden_layers": 12}), SHAPE)
    assert (need.block_bytes, need.request_blocks, need.tokens((1 << 30,))) == ((0,), 0, 0)


@pytest.mark.parametrize("keeps_windows", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "gemma3", "deepseek_v3"])
def test_a_configuration_without_dimensions_has_no_size_and_no_error(kind: str, keeps_windows: bool) -> None:
    config = models.config_of({"model_type": kind, "num_hidden_layers": 12, "kv_lora_rank": 0})
    assert kv_need(config, dataclasses.replace(SHAPE, keeps_windows=keeps_windows)).request_bytes == (0,)


def test_the_stage_with_the_least_room_decides() -> None:
    need = kv_need(models.config_of(models.LLAMA_70B), EngineShape(pipeline=2))
    request = need.request_bytes[0]
    assert need.requests((10 * request, 3 * request)) == 3
    assert need.tokens((10 * request, 3 * request)) == 3 * 4096
    assert need.requests((10 * request, -request)) == 0
