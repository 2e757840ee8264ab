"""The KV cache of a model: bytes of a block on one rank, and blocks of a request.

Follows vLLM's `KVCacheSpec` classes and `get_kv_cache_groups`. All layers share one pool of blocks. A model
with one kind of layers has one group, whose block holds all layers. With several kinds, layers are divided
into groups of equal numbers; each group has blocks of its own for a request, and a block holds the layers of
one group. `tests/contract/test_sizing_against_vllm.py` compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir.checkpoint.attention import LayerCache, LayerKind, layer_caches
from kvasir.checkpoint.model_config import ModelConfig
from kvasir.sizing.dimensions import Dimensions, dimensions
from kvasir.sizing.drafts import Draft
from kvasir.sizing.recurrent import state_bytes
from kvasir.sizing.shape import EngineShape, kv_element_bytes, stages

_EVERY_TOKEN = (LayerKind.FULL, LayerKind.MLA)
_MLA_HYBRID_BLOCK = 128
"""The least block that MLA's kernels take beside recurrent layers."""


@dataclass(frozen=True, slots=True)
class KvNeed:
    """KV of one replica. `block_bytes` has the bytes of a block on a rank of each pipeline stage, and
    `request_blocks` is the number of blocks that one request of max_model_len needs. Both are 0 for a model
    that keeps nothing."""

    block_bytes: tuple[int, ...]
    request_blocks: int
    max_model_len: int

    @property
    def request_bytes(self) -> tuple[int, ...]:
        """Bytes of one request of max_model_len on a rank of each stage."""
        return tuple(each * self.request_blocks for each in self.block_bytes)

    def requests(self, free: tuple[int, ...]) -> float:
        """Return how many requests of max_model_len fit, if the ranks of each stage have `free` bytes."""
        if not self.request_blocks:
            return float("inf")
        return self.blocks(free) / self.request_blocks

    def blocks(self, free: tuple[int, ...]) -> int:
        """Return how many blocks fit: as many as in the stage with the least room."""
        pairs = zip(free, self.block_bytes, strict=True)
        return min((max(0, room) // block for room, block in pairs if block), default=0)

    def tokens(self, free: tuple[int, ...]) -> int:
        """Return how many tokens fit in requests of max_model_len, as vLLM states the size of its cache."""
        return int(self.requests(free) * self.max_model_len) if self.request_blocks else 0


@dataclass(frozen=True, slots=True)
class _Page:
    """What one layer keeps in one block: `size` bytes for `tokens` tokens."""

    kind: LayerKind
    window: int
    size: int
    tokens: int


def kv_need(config: ModelConfig, shape: EngineShape, draft: Draft | None = None) -> KvNeed:
    """Return the KV that `config`'s model keeps as an engine of this shape, with that of its `draft`, which
    is on the last stage."""
    layers = _pages_of(layer_caches(config), config, shape)
    drafted = [] if draft is None else _pages_of(draft.caches, draft.config, shape)
    pages = _unified(_aligned([*layers, *drafted], shape))
    groups = _grouped(pages)
    if not groups:
        return KvNeed((0,) * shape.pipeline, 0, shape.max_model_len)
    blocks = sum(_blocks(pages[group[0]], shape) for group in groups)
    *earlier, last = stages(len(layers), shape.pipeline)
    divided = (*earlier, range(last.start, len(pages)))
    block_bytes = tuple(
        max(sum(pages[at].size for at in group if at in stage) for group in groups) for stage in divided
    )
    return KvNeed(block_bytes, blocks, shape.max_model_len)


def _pages_of(caches: Sequence[LayerCache], config: ModelConfig, shape: EngineShape) -> list[_Page]:
    """Return the page of each layer of which config.json says enough."""
    sizes = dimensions(config)
    widened = not shape.keeps_windows and any(each.kind in _EVERY_TOKEN for each in caches)
    # Most layers of a model are alike.
    pages = {
        each: _page(each, _layer_bytes(each, config, sizes, shape), shape, widened) for each in {*caches}
    }
    return [page for each in caches if (page := pages[each]).size]


def _page(cache: LayerCache, size: int, shape: EngineShape, widened: bool) -> _Page:
    if cache.kind is LayerKind.RECURRENT:
        return _Page(cache.kind, 0, size, 0)
    # vLLM turns its management of several groups off for chunked attention, for the sake of latency.
    full = cache.kind is LayerKind.CHUNKED or (widened and cache.kind is LayerKind.SLIDING)
    kind, window = (LayerKind.FULL, 0) if full else (cache.kind, cache.window)
    return _Page(kind, window, size * shape.block_size, shape.block_size)


def _layer_bytes(cache: LayerCache, config: ModelConfig, sizes: Dimensions, shape: EngineShape) -> int:
    element = kv_element_bytes(shape)
    if cache.kind is LayerKind.RECURRENT:
        return state_bytes(config, shape)
    if cache.kind is LayerKind.MLA:
        # Every rank keeps the whole latent.
        return sizes.latent * element + sizes.indexer
    if cache.kind is LayerKind.SLIDING:
        return _heads(sizes.sliding_heads, shape) * 2 * sizes.sliding_size * element
    return _heads(sizes.kv_heads, shape) * (sizes.head_size + sizes.value_size) * element


def _heads(total: int, shape: EngineShape) -> int:
    """Return the KV heads of one rank: heads fewer than ranks are kept by several."""
    return max(1, total // shape.tensor)


def _aligned(pages: list[_Page], shape: EngineShape) -> list[_Page]:
    """Beside recurrent layers a block has as many tokens as make it as large as a state."""
    states = [page.size for page in pages if page.kind is LayerKind.RECURRENT]
    attention = [page for page in pages if page.kind is not LayerKind.RECURRENT]
    if not states or not attention:
        return pages
    token = max(page.size // page.tokens for page in attention)
    latent = any(page.kind is LayerKind.MLA for page in attention)
    unit = max(shape.block_size, _MLA_HYBRID_BLOCK if latent else 0)
    tokens = unit * _up(max(states), unit * token)
    return [
        replace(page, size=tokens * token)
        if page.kind is LayerKind.RECURRENT
        else replace(page, size=page.size // page.tokens * tokens, tokens=tokens)
        for page in pages
    ]


def _unified(pages: list[_Page]) -> list[_Page]:
    """Kinds of layers that share a pool have blocks of the same size: of more tokens, or padded."""
    if len({_bucket(page) for page in pages}) <= 1 or _one_group(pages):
        return pages
    largest = max(page.size for page in pages)
    return [
        replace(page, tokens=page.tokens * largest // page.size, size=largest)
        if largest % page.size == 0
        else replace(page, size=largest)
        for page in pages
    ]


def _bucket(page: _Page) -> tuple[LayerKind, int, int, int]:
    return page.kind, page.window, page.size, page.tokens


def _one_group(pages: list[_Page]) -> bool:
    """Whether every layer keeps every token, so that they share one block table whatever their sizes."""
    return all(page.kind in _EVERY_TOKEN for page in pages)


def _grouped(pages: list[_Page]) -> list[list[int]]:
    """Return the indices of the layers of each group."""
    if not pages:
        return []
    if _one_group(pages):
        return [list(range(len(pages)))]
    buckets: dict[tuple[LayerKind, int, int, int], list[int]] = {}
    for at, page in enumerate(pages):
        buckets.setdefault(_bucket(page), []).append(at)
    fewest, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    # vLLM's rule against too many layers of padding.
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for layers in buckets.values():
        number = _up(len(layers), size)
        groups += [layers[first::number] for first in range(number)]
    return groups


def _blocks(page: _Page, shape: EngineShape) -> int:
    """Return the blocks of one request of max_model_len in a group of such layers."""
    if page.kind is LayerKind.RECURRENT:
        # With prefix caching, the state at the last block's end is kept beside the current one.
        return 2 if shape.prefix_caching else 1
    if page.kind is LayerKind.SLIDING:
        scheduled = shape.steps_in_flight * shape.max_num_batched_tokens
        # The window need not begin at a block's start.
        return _up(min(page.window - 1 + scheduled, shape.max_model_len), page.tokens) + 1
    return _up(shape.max_model_len, page.tokens)


def _up(value: int, unit: int) -> int:
    return -(-value // unit)
