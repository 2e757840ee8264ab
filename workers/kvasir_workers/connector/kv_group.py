"""The layers whose KV is moved: vLLM's only KV cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvasir.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class KvGroup(NamedTuple):
    """`block_size` is in tokens, `kv_heads` and `head_size` are those of the first layer. `window` is the
    number of tokens whose blocks vLLM keeps, None for all. `whole`: every tensor-parallel rank has all of it
    (MLA)."""

    block_size: int
    kv_heads: int
    head_size: int
    window: int | None
    whole: bool


def only_group(kv_cache_config: KVCacheConfig) -> KvGroup:
    """Return the group of all layers. Raise ConfigError if there are several, or one that cannot be moved."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    layers = _layers_of(specs[0]) if len(specs) == 1 else []
    if not layers or not all(map(_moves, layers)):
        kinds = ", ".join(type(spec).__name__ for spec in specs) or "none"
        raise ConfigError(
            f"KV transfer and tiers move KV of one kind, and this model's KV groups are: {kinds}; set "
            "disaggregation: never, and leave tiers out"
        )
    first = layers[0]
    window = first.sliding_window if isinstance(first, SlidingWindowSpec) else None
    whole = all(isinstance(layer, MLAAttentionSpec) for layer in layers)
    return KvGroup(first.block_size, first.num_kv_heads, first.head_size, window, whole)


def _layers_of(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return what a group's layers keep, if they differ in their heads, or the one for all of them."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _moves(spec: KVCacheSpec) -> bool:
    return isinstance(spec, FullAttentionSpec | SlidingWindowSpec) and not isinstance(
        spec, SlidingWindowMLASpec
    )
