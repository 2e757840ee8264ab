"""The recurrent state that one layer keeps of a request, in bytes of one rank.

The shapes are those of vLLM's `MambaStateShapeCalculator`: a short convolution's last inputs, and the state
of a state-space model or of linear attention. Both are divided among tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import count
from kvasir.sizing.shape import ELEMENT_BYTES, EngineShape, element_bytes

_CONVOLUTION = ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "conv_kernel_size")
_STATE = ("mamba_d_state", "ssm_state_size", "state_size")
_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_HEAD_SIZE = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_EXPAND = ("mamba_expand", "expand")
_KIMI_CONVOLUTION = 4
_IN_FULL_PRECISION = ("nemotron_h", "kimi_linear")
"""Types whose states vLLM keeps in float32 by default."""


def state_bytes(config: ModelConfig, shape: EngineShape) -> int:
    """Return the bytes of the state of one request in one recurrent layer, on one rank; 0 if config.json does
    not say."""
    text = config.text
    convolution, state = _elements(text, shape.tensor)
    return convolution * element_bytes(shape.dtype) + state * _state_element_bytes(config, shape)


def _state_element_bytes(config: ModelConfig, shape: EngineShape) -> int:
    stated = str(config.text.get("mamba_ssm_dtype") or "")
    if stated in ELEMENT_BYTES:
        return ELEMENT_BYTES[stated]
    return 4 if config.text_type in _IN_FULL_PRECISION else element_bytes(shape.dtype)


def _elements(text: Mapping[str, Any], tensor: int) -> tuple[int, int]:
    """Return the elements of the convolution's inputs and of the state."""
    if heads := count(text, "linear_num_value_heads"):
        return _gated_delta_net(text, heads, tensor)
    if isinstance(linear := text.get("linear_attn_config"), dict):
        width = count(linear, "num_heads") * (size := count(linear, "head_dim"))
        kept = (count(linear, "short_conv_kernel_size") or _KIMI_CONVOLUTION) - 1
        return 3 * width // tensor * kept, width // tensor * size
    if length := count(text, "conv_L_cache"):
        return (count(text, "conv_dim") or count(text, "hidden_size")) // tensor * (length - 1), 0
    kept = max(0, count(text, *_CONVOLUTION) - 1)
    states, heads, size = (
        count(text, *_STATE),
        count(text, *_HEADS),
        count(text, *_HEAD_SIZE),
    )
    if states and heads and size:
        groups = count(text, *_GROUPS)
        if groups % tensor:
            groups = tensor
        width = heads * size + 2 * groups * states
        return width // tensor * kept, heads // tensor * size * states
    if states:
        width = (count(text, *_EXPAND) or 2) * count(text, "hidden_size") // tensor
        return width * kept, width * states
    heads, hidden = count(text, "num_attention_heads"), count(text, "hidden_size")
    size = count(text, "head_dim") or (hidden // heads if heads else 0)
    return 0, heads // tensor * size * size


def _gated_delta_net(text: Mapping[str, Any], value_heads: int, tensor: int) -> tuple[int, int]:
    keys, values = count(text, "linear_key_head_dim"), count(text, "linear_value_head_dim")
    width = 2 * keys * count(text, "linear_num_key_heads") + values * value_heads
    kept = max(0, count(text, "linear_conv_kernel_dim") - 1)
    return width // tensor * kept, value_heads // tensor * values * keys
