"""Public models for tests of memory: those that ship with `kvasir plan` and more, and tensors made from them.

Names and shapes are those of the published checkpoints, whose sizes tests compare with the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.tensors import TensorHeader
from kvasir_platform.capacity.known_models import KNOWN_MODELS

LLAMA_8B = KNOWN_MODELS["llama-3.1-8b"].values
LLAMA_70B = KNOWN_MODELS["llama-3.1-70b"].values
LLAMA_405B = KNOWN_MODELS["llama-3.1-405b"].values
QWEN3_8B = KNOWN_MODELS["qwen3-8b"].values
QWEN3_30B = KNOWN_MODELS["qwen3-30b-a3b"].values
GPT_OSS_120B = KNOWN_MODELS["gpt-oss-120b"].values
DEEPSEEK_V3 = KNOWN_MODELS["deepseek-v3"].values
GEMMA3_27B = KNOWN_MODELS["gemma-3-27b"].values
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "head_dim": 256, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "vocab_size": 151936,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE4_SMALL: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 4096,
    "intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 40,
    "num_local_experts": 72, "num_experts_per_tok": 10, "vocab_size": 100352, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "torch_dtype": "bfloat16",
}  # fmt: skip

_BITS = {"BF16": 16, "F32": 32, "F8_E4M3": 8, "U8": 8}


def config_of(values: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that a folder with this config.json has."""
    return ModelConfig(Path("/model"), values, values.get("text_config", values))


def tensors_of(values: Mapping[str, Any]) -> tuple[TensorHeader, ...]:
    """Return the tensors of the model's checkpoint, without its vision tower."""
    text = values.get("text_config", values)
    made = [
        ("model.embed_tokens.weight", "BF16", (text["vocab_size"], text["hidden_size"])),
        ("model.norm.weight", "BF16", (text["hidden_size"],)),
    ]
    if text.get("tie_word_embeddings") is False:
        made.append(("lm_head.weight", "BF16", (text["vocab_size"], text["hidden_size"])))
    for layer in range(text["num_hidden_layers"]):
        for name, dtype, shape in _layer(text, layer):
            made.append((f"model.layers.{layer}.{name}", dtype, shape))
    return tuple(
        TensorHeader(name, dtype, shape, prod(shape) * _BITS[dtype] // 8, "model.safetensors")
        for name, dtype, shape in made
    )


_Made = Iterator[tuple[str, str, tuple[int, ...]]]


def _layer(text: Mapping[str, Any], layer: int) -> _Made:
    hidden = text["hidden_size"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", "BF16", (hidden,)
    yield from _latent_attention(text) if "kv_lora_rank" in text else _attention(text)
    if text["model_type"] == "gpt_oss":
        yield from _packed_experts(text)
    elif "moe_intermediate_size" in text and layer >= text.get("first_k_dense_replace", 0):
        yield from _experts(text)
    else:
        yield from _mlp(text, "mlp", text["intermediate_size"])


def _attention(text: Mapping[str, Any]) -> _Made:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    size = text.get("head_dim", hidden // heads)
    keys = text["num_key_value_heads"] * size
    yield "self_attn.q_proj.weight", "BF16", (heads * size, hidden)
    yield "self_attn.k_proj.weight", "BF16", (keys, hidden)
    yield "self_attn.v_proj.weight", "BF16", (keys, hidden)
    yield "self_attn.o_proj.weight", "BF16", (hidden, heads * size)


def _latent_attention(text: Mapping[str, Any]) -> _Made:
    hidden, heads, latent = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    query, rope = text["q_lora_rank"], text["qk_rope_head_dim"]
    yield from _fp8("self_attn.q_a_proj", (query, hidden))
    yield from _fp8("self_attn.q_b_proj", (heads * (text["qk_nope_head_dim"] + rope), query))
    yield from _fp8("self_attn.kv_a_proj_with_mqa", (latent + rope, hidden))
    yield from _fp8("self_attn.kv_b_proj", (heads * (text["qk_nope_head_dim"] + text["v_head_dim"]), latent))
    yield from _fp8("self_attn.o_proj", (hidden, heads * text["v_head_dim"]))


def _mlp(text: Mapping[str, Any], at: str, width: int) -> _Made:
    hidden = text["hidden_size"]
    quantized = "quantization_config" in text
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        if quantized:
            yield from _fp8(f"{at}.{name}_proj", shape)
        else:
            yield f"{at}.{name}_proj.weight", "BF16", shape


def _experts(text: Mapping[str, Any]) -> _Made:
    experts = text.get("n_routed_experts") or text["num_experts"]
    yield "mlp.gate.weight", "BF16", (experts, text["hidden_size"])
    if "n_shared_experts" in text:
        yield from _mlp(text, "mlp.shared_experts", text["moe_intermediate_size"])
    for expert in range(experts):
        yield from _mlp(text, f"mlp.experts.{expert}", text["moe_intermediate_size"])


def _packed_experts(text: Mapping[str, Any]) -> _Made:
    experts, hidden, width = text["num_local_experts"], text["hidden_size"], text["intermediate_size"]
    yield "mlp.router.weight", "BF16", (experts, hidden)
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        yield f"mlp.experts.{name}_blocks", "U8", (experts, rows, columns // 32, 16)
        yield f"mlp.experts.{name}_scales", "U8", (experts, rows, columns // 32)
        yield f"mlp.experts.{name}_bias", "BF16", (experts, rows)


def _fp8(name: str, shape: tuple[int, int]) -> _Made:
    yield f"{name}.weight", "F8_E4M3", shape
    yield f"{name}.weight_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))
