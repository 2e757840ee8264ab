"""Weights that are not of the model that config.json describes are noticed by names and shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.checkpoint.consistency import embedded_tokens, mismatch
from kvasir.checkpoint.model_config import read_model_config
from kvasir.checkpoint.tensors import TensorHeader, read_tensors
from kvasir.config.load.model_files import resolve_model


def differs(values: dict[str, Any], stated: dict[str, Any]) -> str | None:
    """Return what is said of the tensors of `values` beside a configuration with `stated` in its place."""
    return mismatch(models.config_of(values | stated), models.tensors_of(values))


@pytest.mark.parametrize(
    "values",
    [
        models.LLAMA_8B, models.QWEN3_30B, models.GPT_OSS_120B, models.DEEPSEEK_V3, models.GEMMA3_27B,
        models.QWEN3_NEXT_80B, models.GRANITE4_SMALL,
    ],
    ids=lambda values: values["model_type"],
)  # fmt: skip
def test_published_models_fit_their_configuration(values: dict[str, Any]) -> None:
    assert differs(values, {}) is None


def test_the_shipped_model_fits_its_configuration() -> None:
    folder = resolve_model("kvasir-tiny")
    assert mismatch(read_model_config(folder), read_tensors(folder)) is None


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"num_hidden_layers": 33}, "config.json has 33 layers, and the weights have 32"),
        ({"vocab_size": 32000}, "config.json has vocab_size 32000, and model.embed_tokens.weight in"),
        ({"hidden_size": 5120}, "config.json has hidden_size 5120, and model.embed_tokens.weight in"),
    ],
)
def test_what_differs_is_named_with_both_values(stated: dict[str, Any], message: str) -> None:
    found = differs(models.LLAMA_8B, stated)
    assert found is not None
    assert found.startswith(message)


def test_layers_beyond_the_model_s_are_those_that_predict_further_tokens() -> None:
    assert differs(models.DEEPSEEK_V3, {"num_hidden_layers": 60}) is None


def test_weights_packed_for_mlx_are_told_from_those_of_vllm_s_methods() -> None:
    packed = [TensorHeader("model.embed_tokens.weight", "U32", (128256, 512), 4, "model.safetensors")]
    config = models.config_of(models.LLAMA_8B | {"quantization": {"bits": 4, "group_size": 64}})
    assert "packed as MLX does it" in (mismatch(config, packed) or "")
    awq = models.config_of(models.LLAMA_8B | {"quantization_config": {"quant_method": "awq"}})
    assert mismatch(awq, packed) is None


@pytest.mark.parametrize(
    "stated", [{"model_type": "albert"}, {"text_config": {"num_hidden_layers": 99, "vocab_size": 7}}]
)
def test_a_type_whose_layers_may_share_weights_is_left_to_the_engine(stated: dict[str, Any]) -> None:
    config = models.config_of(models.LLAMA_8B | {"num_hidden_layers": 99} | stated)
    assert mismatch(config, models.tensors_of(models.LLAMA_8B)) is None


def test_the_tokens_with_embeddings_are_known_of_types_whose_vocabulary_is_that() -> None:
    assert embedded_tokens(models.config_of(models.LLAMA_8B)) == 128256
    assert embedded_tokens(models.config_of(models.LLAMA_8B | {"model_type": "albert"})) is None
    assert embedded_tokens(models.config_of(models.GEMMA3_27B)) is None
