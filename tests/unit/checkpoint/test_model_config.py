"""config.json: the language model in it, its positions, dtype and quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.model_config import ModelConfig, read_model_config
from kvasir.core.errors import ConfigError


def config(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model_config(folder)


def test_a_plain_model_is_its_own_text_model(tmp_path: Path) -> None:
    read = config(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16")
    assert (read.architectures, read.model_type, read.dtype) == (("LlamaForCausalLM",), "llama", "bfloat16")
    assert read.text == read.raw
    assert (read.max_positions, read.quantization) == (2048, None)


@pytest.mark.parametrize(
    "nested",
    [
        lambda text: {"text_config": text},
        lambda text: {"llm_config": text},
        lambda text: {"language_config": text},
        lambda text: {"thinker_config": {"text_config": text}},
    ],
)
def test_a_composite_model_has_its_text_model_nested(tmp_path: Path, nested: Any) -> None:
    text = {"max_position_embeddings": 512, "dtype": "float16"}
    read = config(tmp_path, **nested(text))
    assert (read.text, read.max_positions, read.dtype) == (text, 512, "float16")


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 8192),
        ({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 32768),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "mrope", "mrope_section": [1]}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": None}}, 4096),
        (
            {
                "max_position_embeddings": 1000,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "linear", "factor": 8},
                },
            },
            8000,
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 1000,
                "rope_scaling": {"rope_type": "linear", "factor": 8},
            },
            1000,
        ),
    ],
)
def test_positions_are_scaled_as_vllm_scales_them(
    tmp_path: Path, fields: dict[str, Any], positions: int
) -> None:
    read = config(tmp_path, **fields)
    assert (read.max_positions, read.default_positions) == (positions, positions)


def test_long_rope_is_used_only_when_asked_for(tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    read = config(
        tmp_path, max_position_embeddings=131072, original_max_position_embeddings=4096, rope_scaling=rope
    )
    assert (read.max_positions, read.default_positions) == (131072, 4096)


def test_sentence_transformers_state_a_maximum_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert config(tmp_path, max_position_embeddings=512).max_positions == 256


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantization_is_found_in_the_model_and_its_text_model(tmp_path: Path, key: str) -> None:
    assert config(tmp_path, **{key: {"quant_method": "awq"}}).quantization == {"quant_method": "awq"}
    assert config(tmp_path, text_config={key: {"bits": 4}}).quantization == {"bits": 4}


def test_quantization_by_modelopt_is_read_from_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    assert config(tmp_path).quantization == {"producer": {"name": "modelopt"}}


@pytest.mark.parametrize(("text", "problem"), [("{nope", "not valid JSON"), ("[]", "not valid JSON")])
def test_invalid_json_names_the_file(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config.json: {problem}"):
        read_model_config(tmp_path)


def test_a_missing_configuration_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.json: No such file"):
        read_model_config(tmp_path)


def test_positions_that_are_not_stated_are_the_types_default_or_unknown(tmp_path: Path) -> None:
    gemma = config(tmp_path, model_type="gemma3", text_config={"hidden_size": 2560})
    assert (gemma.text_type, gemma.max_positions) == ("gemma3_text", 131_072)
    assert config(tmp_path, model_type="own").max_positions is None


def test_the_tokenizer_bounds_encoders_with_absolute_positions(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    encoder = {"architectures": ["BertModel"], "max_position_embeddings": 512}
    assert config(tmp_path, **encoder).max_positions == 512
    assert config(tmp_path, **encoder, position_embedding_type="absolute").max_positions == 128
