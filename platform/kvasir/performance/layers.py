"""The parameters of a model's layers, counted from config.json: linear layers, without biases and norms.

Shapes are those of transformers' modeling code, which vLLM loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.checkpoint.attention import LayerCache, LayerKind
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import count, positive
from kvasir.sizing.dimensions import Dimensions

_GATED, _PLAIN = 3, 2
"""Matrices of a feed-forward layer: gate, up and down, or only up and down."""
_PLAIN_TYPES = (
    "apertus", "arcee", "bert", "bloom", "camembert", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gptj", "mpt", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "roberta", "starcoder2",
    "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
_TIED_TYPES = (
    "bloom", "cohere", "cohere2", "falcon", "falcon_mamba", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4",
    "gpt2", "gpt_bigcode", "gpt_neo", "lfm2", "lfm2_moe", "mamba", "mpt", "opt", "smollm3", "starcoder2",
    "zamba2",
)  # fmt: skip
"""Types whose head is the embedding where config.json does not say."""
_LEARNED_POSITIONS = (
    "bert", "camembert", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "roberta", "xlm-roberta",
    "xlm-roberta-xl",
)  # fmt: skip
_GATED_QUERIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Types whose queries come with a gate of the same width."""
_WITHOUT_FORWARD = ("mamba", "mamba2", "falcon_mamba")
_SHARED_EXPERTS = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
)
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward layers of a model. Parameters: `dense` of all layers, with shared experts and routers,
    and `expert` of one expert in one of `expert_layers` layers."""

    dense: float
    expert: float
    expert_layers: int


def text_type(config: ModelConfig) -> str:
    """Return the type of the language model, without the suffix of nested configurations."""
    return config.text_type.removesuffix("_text")


def tied(config: ModelConfig) -> bool:
    """Whether the head is the embedding."""
    for values in (config.text, config.raw):
        for name in ("tie_word_embeddings", "tie_embedding"):
            if isinstance(values.get(name), bool):
                return bool(values[name])
    return text_type(config) in _TIED_TYPES


def positions(config: ModelConfig) -> int:
    """Return the number of positions that have an embedding of their own."""
    if text_type(config) not in _LEARNED_POSITIONS:
        return 0
    return count(config.text, "n_positions", "max_position_embeddings")


def feed_forward(config: ModelConfig, sizes: Dimensions) -> FeedForward:
    """Return the parameters of feed-forward layers."""
    text, kind = config.text, text_type(config)
    matrices = _PLAIN if kind in _PLAIN_TYPES else _GATED
    layers = _expert_layers(text, kind, sizes)
    dense = matrices * sizes.hidden * _dense_width(text, kind, sizes) * _dense_layers(text, sizes, layers)
    if not layers:
        return FeedForward(float(dense), 0.0, 0)
    number = count(
        text, "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"
    )
    shared = number * sizes.expert_size or count(text, *_SHARED_WIDTHS)
    if kind == "llama4":
        shared = sizes.expert_size
    every_token = layers * sizes.hidden * (matrices * shared + sizes.experts)
    return FeedForward(float(dense + every_token), float(matrices * sizes.hidden * sizes.expert_size), layers)


def _dense_width(text: Mapping[str, Any], kind: str, sizes: Dimensions) -> int:
    if kind == "granitemoehybrid":
        return count(text, "shared_intermediate_size") or sizes.intermediate
    if kind == "lfm2" and text.get("block_auto_adjust_ff_dim", True):
        unit = count(text, "block_multiple_of") or 256
        scaled = 2 * sizes.intermediate // 3 * float(text.get("block_ffn_dim_multiplier") or 1.0)
        return math.ceil(scaled / unit) * unit
    return count(text, "ffn_hidden_size", "intermediate_size_mlp") or sizes.intermediate


def _dense_layers(text: Mapping[str, Any], sizes: Dimensions, expert_layers: int) -> int:
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        return pattern.count("-")
    return (
        0 if text.get("model_type") in ("mamba", "mamba2", "falcon_mamba") else sizes.layers - expert_layers
    )


def _expert_layers(text: Mapping[str, Any], kind: str, sizes: Dimensions) -> int:
    """Return the number of layers with experts, the others being dense."""
    layers = sizes.layers
    if not sizes.experts or not sizes.experts_per_token:
        return 0
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        return pattern.count("E")
    if isinstance(listed := text.get("moe_layers"), list):
        return len(listed)
    if period := count(text, "expert_layer_period") or (2 if kind == "jamba" else 0):
        offset = positive(text.get("expert_layer_offset", 1))
        return sum(at % period == offset for at in range(layers))
    first = count(text, "first_k_dense_replace", "moe_layer_start_index")
    frequency = text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return sum(1 for each in frequency if each)
    every = positive(frequency) or count(
        text, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"
    )
    only = text.get("mlp_only_layers")
    dense = set(only) if isinstance(only, list) else set()
    step = every or 1
    # Every nth layer, counted from 1, except with DeepSeek's, counted from 0.
    shift = 0 if frequency is not None else 1
    return sum(at >= first and at not in dense and (at + shift) % step == 0 for at in range(layers))


def projections(cache: LayerCache, sizes: Dimensions, config: ModelConfig) -> float:
    """Return the parameters of the projections of one layer that keeps `cache`."""
    text, hidden = config.text, sizes.hidden
    if cache.kind is LayerKind.RECURRENT:
        return float(_recurrent(text, hidden))
    if cache.kind is LayerKind.MLA:
        latent, rope = count(text, "kv_lora_rank"), count(text, "qk_rope_head_dim")
        nope, value = count(text, "qk_nope_head_dim"), count(text, "v_head_dim")
        queries, low = sizes.heads * (nope + rope), count(text, "q_lora_rank")
        query = low * (hidden + queries) if low else hidden * queries
        out = sizes.heads * value * hidden
        return float(query + hidden * (latent + rope) + latent * sizes.heads * (nope + value) + out)
    kv_heads, size, values = kv_sizes(cache, sizes)
    queries = 2 if text_type(config) in _GATED_QUERIES else 1
    return float(hidden * (sizes.heads * (queries * size + values) + kv_heads * (size + values)))


def kv_sizes(cache: LayerCache, sizes: Dimensions) -> tuple[int, int, int]:
    """Return the KV heads of a layer with attention, and the sizes of a head's keys and values."""
    if cache.kind is LayerKind.SLIDING:
        return sizes.sliding_heads, sizes.sliding_size, sizes.sliding_size
    return sizes.kv_heads, sizes.head_size, sizes.value_size


def _recurrent(text: Mapping[str, Any], hidden: int) -> int:
    """Return the parameters of a recurrent layer: Gated DeltaNet, Kimi Delta Attention, a short convolution,
    Mamba 2, Mamba, or linear attention."""
    if values := count(text, "linear_num_value_heads"):
        value = values * count(text, "linear_value_head_dim")
        key = count(text, "linear_num_key_heads") * count(text, "linear_key_head_dim")
        return hidden * (2 * key + 3 * value + 2 * values)
    if isinstance(linear := text.get("linear_attn_config"), dict):
        heads, size = count(linear, "num_heads"), count(linear, "head_dim")
        return hidden * (4 * heads * size + heads) + 2 * size * (hidden + heads * size)
    if count(text, "conv_L_cache"):
        width = count(text, "conv_dim") or hidden
        return 3 * hidden * width + width * hidden
    states = count(text, "mamba_d_state", "ssm_state_size", "state_size")
    heads = count(text, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    size = count(text, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if states and heads and size:
        groups = count(text, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
        return hidden * (3 * heads * size + 2 * groups * states + heads)
    if states:
        width = (count(text, "mamba_expand", "expand") or 2) * hidden
        rank = count(text, "mamba_dt_rank", "time_step_rank") or math.ceil(hidden / 16)
        return 3 * hidden * width + width * (2 * rank + 2 * states)
    width = count(text, "num_attention_heads") * count(text, "head_dim") or hidden
    return 5 * hidden * width
