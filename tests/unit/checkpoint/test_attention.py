"""What layers keep, as config.json says it or leaves it to the type's defaults; and what can be moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.attention import LayerKind, layer_caches
from kvasir.checkpoint.kv_movement import kv_movement
from kvasir.checkpoint.model_config import ModelConfig

FULL, SLIDING, CHUNKED = LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED
MLA, RECURRENT = LayerKind.MLA, LayerKind.RECURRENT


def configured(model_type: str, **fields: Any) -> ModelConfig:
    raw = {"model_type": model_type, "num_hidden_layers": 6, **fields}
    return ModelConfig(Path("model"), raw, raw)


def kinds(config: ModelConfig) -> list[LayerKind]:
    return [each.kind for each in layer_caches(config)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (configured("llama"), [FULL] * 6),
        (configured("gpt2", num_hidden_layers=None, n_layer=2), [FULL] * 2),
        (configured("mistral"), [SLIDING] * 6),
        (configured("mistral", sliding_window=None), [FULL] * 6),
        (configured("mixtral"), [FULL] * 6),
        (configured("phi3", sliding_window=2047), [SLIDING] * 6),
        (configured("qwen3", sliding_window=4096), [FULL] * 6),
        (
            configured("qwen3", sliding_window=4096, use_sliding_window=True, max_window_layers=4),
            [FULL] * 4 + [SLIDING] * 2,
        ),
        (configured("gemma2"), [SLIDING, FULL] * 3),
        (configured("gemma3_text"), [SLIDING] * 5 + [FULL]),
        (configured("gemma3_text", sliding_window_pattern=3), [SLIDING, SLIDING, FULL] * 2),
        (configured("gemma3_text", layer_types=["full_attention"] * 2), [FULL] * 2),
        (configured("exaone4", sliding_window_pattern="LLLG"), [SLIDING] * 3 + [FULL] + [SLIDING] * 2),
        (configured("gemma3n_text", num_kv_shared_layers=1), [SLIDING] * 4 + [FULL]),
        (configured("gpt_oss"), [SLIDING, FULL] * 3),
        (configured("llama4_text"), [CHUNKED] * 3 + [FULL] + [CHUNKED] * 2),
        (configured("llama4_text", attention_chunk_size=None), [FULL] * 6),
        (configured("deepseek_v3", kv_lora_rank=512), [MLA] * 6),
        (configured("qwen3_next"), [RECURRENT] * 3 + [FULL] + [RECURRENT] * 2),
        (configured("jamba", attn_layer_period=3, attn_layer_offset=1), [RECURRENT, FULL, RECURRENT] * 2),
        (configured("falcon_h1", num_hidden_layers=2), [FULL, RECURRENT] * 2),
        (configured("nemotron_h", hybrid_override_pattern="M-*E"), [RECURRENT, FULL]),
        (
            configured("kimi_linear", kv_lora_rank=8, linear_attn_config={"full_attn_layers": [3, 6]}),
            [RECURRENT, RECURRENT, MLA] * 2,
        ),
        (configured("bert", architectures=["BertModel"]), []),
    ],
    ids=lambda each: each.model_type if isinstance(each, ModelConfig) else "",
)
def test_layers_keep_what_the_type_and_its_fields_say(config: ModelConfig, expected: list[LayerKind]) -> None:
    assert kinds(config) == expected


def test_a_nested_configuration_counts_with_its_own_type() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 1024}
    nested = ModelConfig(Path("model"), {"model_type": "gemma3", "text_config": text}, text)
    assert kinds(nested) == [SLIDING] * 5 + [FULL]
    assert {each.window for each in layer_caches(nested)} == {0, 1024}


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("Gemma2Config", "gemma2"), ("Gemma3TextConfig", "gemma3_text"), ("GptOssConfig", "gpt_oss"),
        ("Cohere2Config", "cohere2"), ("Olmo3Config", "olmo3"), ("Exaone4Config", "exaone4"),
        ("Llama4TextConfig", "llama4_text"), ("Qwen3NextConfig", "qwen3_next"), ("Lfm2Config", "lfm2"),
        ("MiniMaxConfig", "minimax"), ("Gemma3nTextConfig", "gemma3n_text"),
    ],
)  # fmt: skip
def test_defaults_are_those_of_transformers(name: str, model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    words = {"full_attention": FULL, "sliding_attention": SLIDING, "chunked_attention": CHUNKED}
    theirs = getattr(transformers, name)(num_hidden_layers=12)
    shared = getattr(theirs, "num_kv_shared_layers", 0)
    expected = [words.get(word, RECURRENT) for word in theirs.layer_types]
    ours = configured(model_type, num_hidden_layers=12, num_kv_shared_layers=shared)
    assert kinds(ours) == expected[: 12 - shared]


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "mistral", "phi3"])
def test_kv_of_one_kind_moves_at_no_cost(model_type: str) -> None:
    moved = kv_movement(configured(model_type))
    assert not moved.obstacle
    assert not moved.widened
    assert not moved.cost


@pytest.mark.parametrize(
    ("config", "widened"),
    [(configured("gemma3_text"), 5), (configured("gpt_oss"), 3), (configured("llama4_text"), 5)],
    ids=lambda each: each.model_type if isinstance(each, ModelConfig) else "",
)
def test_interleaved_windows_move_when_every_layer_keeps_every_token(
    config: ModelConfig, widened: int
) -> None:
    moved = kv_movement(config)
    assert not moved.obstacle
    assert (moved.widened, moved.layers) == (widened, 6)
    assert f"{widened} of 6 layers attend to the last {moved.window} tokens only" in moved.cost


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (configured("qwen3_next"), "5 of its 6 layers keep a recurrent state"),
        (configured("granitemoehybrid", layer_types=["mamba", "attention"]), "1 of its 2 layers keep"),
        (configured("t5", is_encoder_decoder=True), "encoder-decoder"),
        (configured("deepseek_v4", compress_ratios=[4, 128]), "different ratios"),
    ],
    ids=lambda each: each.model_type if isinstance(each, ModelConfig) else "",
)
def test_what_cannot_be_moved_says_why(config: ModelConfig, reason: str) -> None:
    assert reason in kv_movement(config).obstacle
