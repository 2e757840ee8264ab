"""The operations and bytes of a transformer, counted from config.json.

A linear layer takes two operations per parameter and token. Attention takes four per query head, element of a
head and token attended to: a product with the keys and one with the values. Reading goes over all weights of
a step once, whatever its number of tokens, except for experts, of which only those that a token of the step
chose are read. (Kaplan et al., Scaling Laws, 2020, section 2.1; Pope et al., Efficiently Scaling Transformer
Inference, 2022, section 2.)
"""

from __future__ import annotations

from kvasir.checkpoint.attention import FULL, LayerCache, LayerKind, layer_caches
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import count
from kvasir.core.model.work import AttentionWork, ModelWork
from kvasir.performance.layers import feed_forward, kv_sizes, positions, projections, tied
from kvasir.sizing.dimensions import Dimensions, dimensions
from kvasir.sizing.recurrent import state_bytes
from kvasir.sizing.shape import EngineShape

__all__ = ["AttentionWork", "ModelWork", "dense_work", "model_work"]

_STATE_FLOPS = 6.0
"""Operations for each element of a recurrent state and token: its decay, its update and its output."""


def model_work(config: ModelConfig) -> ModelWork:
    """Return the work of the language model that `config` describes. Biases, norms and towers for
    other inputs are not counted."""
    sizes = dimensions(config)
    caches = layer_caches(config)
    encodes = not caches and sizes.heads > 0
    forward = feed_forward(config, sizes)
    kept = (FULL,) * sizes.layers if encodes else caches
    head = float(sizes.hidden * sizes.vocabulary)
    states = sum(cache.kind is LayerKind.RECURRENT for cache in caches)
    state = states * state_bytes(config, EngineShape())
    return ModelWork(
        layers=sizes.layers,
        hidden=sizes.hidden,
        dense=sum(projections(cache, sizes, config) for cache in kept) + forward.dense,
        head=0.0 if encodes else head,
        embedding=(0.0 if tied(config) and not encodes else head) + positions(config) * sizes.hidden,
        attention=_encoder(sizes) if encodes else _attention(caches, sizes, config),
        expert=forward.expert,
        experts=sizes.experts if forward.expert_layers else 0,
        experts_per_token=sizes.experts_per_token if forward.expert_layers else 0,
        expert_layers=forward.expert_layers,
        state_bytes=float(state),
        state_flops=_STATE_FLOPS * state / 2,
    )


def _encoder(sizes: Dimensions) -> tuple[AttentionWork, ...]:
    """Every token of an encoder attends to all others, which is twice as many as in a decoder, and nothing is
    kept."""
    return (AttentionWork(sizes.layers, 8.0 * sizes.heads * sizes.head_size, 0.0),)


def dense_work(*, parameters: float, layers: int, hidden: float, kv_elements: float) -> ModelWork:
    """Return the work of a model of which only sizes are known: all its `parameters` are used by every token,
    `hidden` is the width of all query heads, and a layer keeps `kv_elements` numbers of a token."""
    attention = AttentionWork(layers, 4.0 * hidden, kv_elements)
    return ModelWork(layers, round(hidden), float(parameters), 0.0, 0.0, (attention,))


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
        return _latent(layers, sizes, config)
    kv_heads, size, values = kv_sizes(cache, sizes)
    return AttentionWork(
        layers,
        2.0 * sizes.heads * (size + values),
        float(kv_heads * (size + values)),
        cache.window,
        kv_heads=kv_heads,
    )


def _latent(layers: int, sizes: Dimensions, config: ModelConfig) -> AttentionWork:
    """Streams project their queries to the latent, with which keys and values are one (DeepSeek-V2, section
    2.1); prompts project latents to keys and values of every head, those of earlier chunks again."""
    text = config.text
    latent, rope = count(text, "kv_lora_rank"), count(text, "qk_rope_head_dim")
    nope, value = count(text, "qk_nope_head_dim"), count(text, "v_head_dim")
    return AttentionWork(
        layers,
        2.0 * sizes.heads * (sizes.latent + latent),
        float(sizes.latent),
        prompt_flops=2.0 * sizes.heads * (nope + rope + value),
        expanded_flops=2.0 * latent * sizes.heads * (nope + value),
        kv_heads=1,
    )
