"""int8 weights: close to the originals, created once, and never over an existing copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir.core.errors import ConfigError
from kvasir_workers.engines.vllm.setup.quantize import is_linear, quantize_channels, quantized_folder

torch = pytest.importorskip("torch")


def test_a_channel_is_off_by_at_most_half_a_step() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    quantized, scales = quantize_channels(weight)
    assert quantized.dtype is torch.int8
    assert scales.shape == (16, 1)
    assert bool(((quantized.float() * scales - weight).abs() <= scales * 0.5001).all())


@pytest.mark.parametrize(
    ("name", "dimensions", "linear"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, True),
        ("model.layers.11.mlp.down_proj.weight", 2, True),
        ("model.embed_tokens.weight", 2, False),
        ("lm_head.weight", 2, False),
        ("model.layers.0.input_layernorm.weight", 1, False),
    ],
)
def test_only_linear_layers_of_the_decoder_are_quantized(name: str, dimensions: int, linear: bool) -> None:
    assert is_linear(name, dimensions) is linear


def test_a_copy_is_complete_smaller_and_made_once(tmp_path: Path) -> None:
    source = resolve_model("kvasir-tiny")
    made = quantized_folder(source, tmp_path)
    assert quantized_folder(source, tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    assert (made / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((made / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    size = (made / "model.safetensors").stat().st_size
    assert size < (source / "model.safetensors").stat().st_size


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    made = quantized_folder(resolve_model("kvasir-tiny"), tmp_path)
    with pytest.raises(ConfigError, match="quantized already"):
        quantized_folder(made, tmp_path)
