"""The operations and bytes of a transformer, counted from config.json.

A linear layer takes two operations per parameter and token. Attention takes four per query head, element of a
head and token attended to: a product with the keys and one with the values. Reading goes over all weights of
a step once, whatever its number of tokens, except for experts, of which only those that a token of the step
chose are read. (Kaplan et al., Scaling Laws, 2020, section 2.1; Pope et al., Efficiently Scaling Transformer
Inference, 2022, section 2.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvasir.checkpoint.attention import LayerCache, LayerKind, layer_caches
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import count
from kvasir.sizing.dimensions import Dimensions, dimensions

_GATED = 3
"""Matrices of a gated feed-forward layer: gate, up and down."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """`layers` layers of one kind. For each query token and each token attended to, a layer takes `flops`
    operations; of each token attended to it reads `elements` numbers of KV. `window` is the most tokens that
    are attended to, 0 without a limit."""

    layers: int
    flops: float
    elements: float
    window: int = 0

    def attended(self, context: float) -> float:
        """Return the tokens that a query behind `context` tokens attends to."""
        return min(context, self.window) if self.window else context


@dataclass(frozen=True, slots=True)
class ModelWork:
    """One model. Parameters: `dense` are used by every token, without embedding and head; `expert` are those
    of one expert in one layer, of which there are `experts` in each of `expert_layers`, and each token uses
    `experts_per_token`; `head` produces logits for sampled tokens. `hidden` and `layers` give the size of
    exchanges between devices. `state_elements` are read and written for each sequence and step."""

    layers: int
    hidden: int
    dense: float
    head: float
    embedding: float
    attention: tuple[AttentionWork, ...]
    expert: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    state_elements: float = 0.0

    @property
    def parameters(self) -> float:
        """All parameters."""
        return self.dense + self.head + self.embedding + self.expert * self.experts * self.expert_layers

    @property
    def active(self) -> float:
        """The parameters that one token uses in linear layers, without embedding and head."""
        return self.dense + self.expert * self.experts_per_token * self.expert_layers

    def experts_read(self, tokens: float) -> float:
        """Return the expected number of experts of a layer that are read in a step of `tokens` tokens, each
        choosing `experts_per_token` at random."""
        if not self.experts:
            return 0.0
        unused = 1.0 - self.experts_per_token / self.experts
        return self.experts * (1.0 - math.pow(unused, tokens))

    def linear_flops(self, tokens: float, sampled: float) -> float:
        """Return the operations in linear layers of a step."""
        return 2.0 * (self.active * tokens + self.head * sampled)

    def weights_read(self, tokens: float) -> float:
        """Return the parameters that a step of `tokens` tokens reads."""
        return self.dense + self.head + self.expert * self.experts_read(tokens) * self.expert_layers

    def attention_flops(self, tokens: float, context: float) -> float:
        """Return the operations of attention for `tokens` successive query tokens behind `context` tokens."""
        return sum(
            each.layers * each.flops * tokens * each.attended(context + tokens / 2) for each in self.attention
        )

    def kv_elements(self, context: float) -> float:
        """Return the numbers of KV that a query behind `context` tokens reads."""
        return sum(each.layers * each.elements * each.attended(context) for each in self.attention)


def model_work(config: ModelConfig) -> ModelWork:
    """Return the work of the language model that `config` describes."""
    sizes, text = dimensions(config), config.text
    caches = layer_caches(config)
    expert_layers = _expert_layers(config, sizes)
    feed_forward = _GATED * sizes.hidden * sizes.intermediate * (sizes.layers - expert_layers)
    shared = count(text, "n_shared_experts") * sizes.expert_size or count(
        text, "shared_expert_intermediate_size"
    )
    experts = expert_layers * sizes.hidden * (_GATED * shared + sizes.experts)
    projections = sum(_projections(cache, sizes, config) for cache in caches)
    head = float(sizes.hidden * sizes.vocabulary)
    return ModelWork(
        layers=sizes.layers,
        hidden=sizes.hidden,
        dense=float(projections + feed_forward + experts),
        head=head,
        embedding=0.0 if text.get("tie_word_embeddings") is True else head,
        attention=_attention(caches, sizes, config),
        expert=float(_GATED * sizes.hidden * sizes.expert_size) if expert_layers else 0.0,
        experts=sizes.experts if expert_layers else 0,
        experts_per_token=sizes.experts_per_token if expert_layers else 0,
        expert_layers=expert_layers,
    )


def dense_work(*, parameters: float, layers: int, hidden: float, kv_elements: float) -> ModelWork:
    """Return the work of a model of which only sizes are known: all its `parameters` are used by every token,
    `hidden` is the width of all query heads, and a layer keeps `kv_elements` numbers of a token."""
    attention = AttentionWork(layers, 4.0 * hidden, kv_elements)
    return ModelWork(layers, round(hidden), float(parameters), 0.0, 0.0, (attention,))


def _expert_layers(config: ModelConfig, sizes: Dimensions) -> int:
    if not sizes.experts or not sizes.experts_per_token:
        return 0
    dense = count(config.text, "first_k_dense_replace")
    only = config.text.get("mlp_only_layers")
    listed = len(only) if isinstance(only, list) else 0
    return max(0, sizes.layers - dense - listed) // (count(config.text, "decoder_sparse_step") or 1)


def _projections(cache: LayerCache, sizes: Dimensions, config: ModelConfig) -> float:
    """Return the parameters of one layer's projections."""
    text, hidden = config.text, sizes.hidden
    if cache.kind is LayerKind.RECURRENT:
        # In and out of twice the width (Gu and Dao, Mamba, 2023, section 3.4).
        return 6.0 * hidden * hidden
    if cache.kind is LayerKind.MLA:
        latent, rope = count(text, "kv_lora_rank"), count(text, "qk_rope_head_dim")
        nope, value = count(text, "qk_nope_head_dim"), count(text, "v_head_dim")
        queries, low = sizes.heads * (nope + rope), count(text, "q_lora_rank")
        query = low * (hidden + queries) if low else hidden * queries
        out = sizes.heads * value * hidden
        return query + hidden * (latent + rope) + latent * sizes.heads * (nope + value) + out
    kv_heads, size = _kv(cache, sizes)
    return hidden * size * (2 * sizes.heads + 2 * kv_heads)


def _kv(cache: LayerCache, sizes: Dimensions) -> tuple[int, int]:
    if cache.kind is LayerKind.SLIDING:
        return sizes.sliding_heads, sizes.sliding_size
    return sizes.kv_heads, sizes.head_size


def _attention(
    caches: tuple[LayerCache, ...], sizes: Dimensions, config: ModelConfig
) -> tuple[AttentionWork, ...]:
    kinds: dict[LayerCache, int] = {}
    for cache in caches:
        if cache.kind is not LayerKind.RECURRENT:
            kinds[cache] = kinds.get(cache, 0) + 1
    return tuple(_attention_of(cache, number, sizes, config) for cache, number in kinds.items())


def _attention_of(cache: LayerCache, layers: int, sizes: Dimensions, config: ModelConfig) -> AttentionWork:
    if cache.kind is LayerKind.MLA:
        # Queries are projected to the latent, with which keys and values are one (DeepSeek-V2, section 2.1).
        latent = count(config.text, "kv_lora_rank")
        return AttentionWork(layers, 2.0 * sizes.heads * (sizes.latent + latent), float(sizes.latent))
    kv_heads, size = _kv(cache, sizes)
    return AttentionWork(layers, 4.0 * sizes.heads * size, 2.0 * kv_heads * size, cache.window)
