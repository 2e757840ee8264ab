"""The size of the KV cache, against vLLM's own specifications of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.checkpoint.attention import LayerCache, LayerKind, layer_caches
from kvasir.sizing.dimensions import dimensions
from kvasir.sizing.drafts import draft_model
from kvasir.sizing.kv import kv_need
from kvasir.sizing.shape import EngineShape

pytestmark = pytest.mark.slow

SHAPES = (
    EngineShape(max_model_len=16_384),
    EngineShape(max_model_len=16_384, tensor=2, kv_dtype="fp8", block_size=64),
    EngineShape(max_model_len=100_000, keeps_windows=False, tensor=16),
    EngineShape(max_model_len=2_000, prefix_caching=False),
)
MODELS = (
    models.LLAMA_8B, models.QWEN3_30B, models.GPT_OSS_120B, models.DEEPSEEK_V3, models.GEMMA3_27B,
    models.QWEN3_NEXT_80B, models.GRANITE4_SMALL,
    models.LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096},
    # So nearly as many layers of both kinds that vLLM pads the fewer.
    models.GPT_OSS_120B | {"layer_types": (["sliding_attention", "full_attention"] * 13)[:25]},
)  # fmt: skip

_ONE_LAYER = {"num_hidden_layers": 1}
DRAFTS = (
    (models.LLAMA_8B, models.LLAMA_8B | {"hidden_size": 2048, "head_dim": 64, "num_hidden_layers": 16}),
    (models.LLAMA_8B, models.LLAMA_8B | _ONE_LAYER),
    # Blocks of the draft's layers are of another size than those of both kinds of the model's.
    (models.GPT_OSS_120B, models.QWEN3_8B | _ONE_LAYER),
    (models.GEMMA3_27B, models.LLAMA_8B | _ONE_LAYER),
)
"""Models, each with what proposes its tokens."""


def _specs(values: dict[str, Any], shape: EngineShape) -> dict[str, Any]:
    """Return the specifications that vLLM's layers give for this model."""
    torch = pytest.importorskip("torch")
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    dtype = torch.float8_e4m3fn if shape.kv_dtype == "fp8" else torch.bfloat16
    config = models.config_of(values)
    sizes, caches = dimensions(config), layer_caches(config)
    heads = max(1, sizes.kv_heads // shape.tensor)
    common = {"num_kv_heads": heads, "head_size": sizes.head_size, "dtype": dtype}
    states: tuple[Any, ...] = ()
    block, token = shape.block_size, 0
    if LayerCache(LayerKind.RECURRENT) in caches:
        states = _state(values, shape.tensor)
        page = interface.MambaSpec(-1, shapes=states, dtypes=(torch.bfloat16, torch.bfloat16)).page_size_bytes
        token = interface.FullAttentionSpec(block_size=1, **common).page_size_bytes
        block *= -(-page // (block * token))
    made: dict[LayerKind, Callable[[LayerCache], Any]] = {
        LayerKind.FULL: lambda _: interface.FullAttentionSpec(block_size=block, **common),
        LayerKind.SLIDING: lambda each: interface.SlidingWindowSpec(
            block_size=block, sliding_window=each.window, **common
        ),
        LayerKind.MLA: lambda _: interface.MLAAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=sizes.latent, dtype=dtype
        ),
        LayerKind.RECURRENT: lambda _: interface.MambaSpec(
            block, shapes=states, dtypes=(torch.bfloat16, torch.bfloat16), page_size_padded=block * token
        ),
    }
    return {f"layers.{at}": made[each.kind](each) for at, each in enumerate(caches)}


def _state(values: dict[str, Any], tensor: int) -> tuple[Any, ...]:
    calculator = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
    if "linear_num_value_heads" in values:
        return tuple(calculator.gated_delta_net_state_shape(tensor, 16, 32, 128, 128, 4))
    return tuple(calculator.mamba2_state_shape(tensor, 8192, 1, 128, 64, 128, 4))


def _settings(shape: EngineShape) -> Any:
    layout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not shape.keeps_windows),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            mamba_cache_mode="align" if shape.prefix_caching else "none",
        ),
        model_config=SimpleNamespace(max_model_len=shape.max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=shape.steps_in_flight * shape.max_num_batched_tokens,
        speculative_config=None,
    )


def test_blocks_and_requests_have_the_sizes_that_vllm_gives_them() -> None:
    """Those of models, and of models with a draft."""
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    for values in MODELS:
        recurrent = LayerCache(LayerKind.RECURRENT) in layer_caches(models.config_of(values))
        for stated in SHAPES:
            # vLLM has no engine where a state shares the block table of attention.
            shape = dataclasses.replace(stated, keeps_windows=stated.keeps_windows or recurrent)
            settings = _settings(shape)
            groups = utils.get_kv_cache_groups(settings, _specs(values, shape))
            need = kv_need(models.config_of(values), shape)
            at = (values["model_type"], shape)
            assert need.block_bytes[0] == utils._pool_bytes_per_block(settings, groups), at
            assert need.request_bytes[0] == utils._max_memory_usage_bytes_from_groups(settings, groups), at
    for values, proposes in DRAFTS:
        draft = draft_model(models.config_of(proposes), ())
        for shape in SHAPES:
            settings = _settings(shape)
            further = {f"draft.{name}": spec for name, spec in _specs(proposes, shape).items()}
            groups = utils.get_kv_cache_groups(settings, _specs(values, shape) | further)
            need = kv_need(models.config_of(values), shape, draft)
            at = (f"{values['model_type']} and {proposes['model_type']}", shape)
            assert need.block_bytes[0] == utils._pool_bytes_per_block(settings, groups), at
            assert need.request_bytes[0] == utils._max_memory_usage_bytes_from_groups(settings, groups), at
