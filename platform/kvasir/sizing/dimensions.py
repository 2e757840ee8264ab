"""The dimensions of a language model, under the names that its config.json may have for them.

Names and defaults are those of vLLM's `ModelArchConfigConvertorBase`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import EXPERTS, LAYERS, count

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_HEAD_SIZE = ("head_dim", "hidden_size_per_head")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk",
    "moe_top_k",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes in elements; 0 for what a model does not have. `value_size` is the size of a head's values.
    `latent` is what MLA keeps of a token, and `indexer` the bytes that its index of tokens adds.
    `sliding_heads` and `sliding_size` are the KV heads and their size in layers with a window."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    sliding_heads: int
    sliding_size: int
    vocabulary: int
    intermediate: int
    experts: int
    experts_per_token: int
    expert_size: int
    latent: int
    indexer: int


def dimensions(config: ModelConfig) -> Dimensions:
    """Return the dimensions of the language model in `config`."""
    text = config.text
    hidden, heads = count(text, *_HIDDEN), count(text, *_HEADS)
    # Falcon's configurations state as many KV heads as query heads beside it.
    shared = text.get("multi_query") is True and text.get("new_decoder_architecture") is not True
    kv_heads = 1 if shared else count(text, *_KV_HEADS)
    size = count(text, *_HEAD_SIZE) or (hidden // heads if heads else 0)
    intermediate = count(text, *_INTERMEDIATE) or 4 * hidden
    index = count(text, "index_head_dim")
    return Dimensions(
        layers=count(text, *LAYERS),
        hidden=hidden,
        heads=heads,
        # Gemma 4 has wider and fewer KV heads in layers without a window.
        kv_heads=count(text, "num_global_key_value_heads") or kv_heads or heads,
        head_size=count(text, "global_head_dim") or size,
        value_size=count(text, "global_head_dim", "v_head_dim") or size,
        sliding_heads=kv_heads or heads,
        sliding_size=size,
        vocabulary=count(text, "vocab_size"),
        intermediate=intermediate,
        experts=count(text, *EXPERTS),
        experts_per_token=count(text, *_EXPERTS_PER_TOKEN),
        expert_size=count(text, "moe_intermediate_size", "expert_ffn_hidden_size") or intermediate,
        latent=count(text, "kv_lora_rank") + count(text, "qk_rope_head_dim"),
        # One byte for each element and a float32 scale for each 128 of them.
        indexer=index + index // 128 * 4 if count(text, "index_topk") else 0,
    )
