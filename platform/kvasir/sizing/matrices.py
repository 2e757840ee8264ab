"""The inputs and outputs of the linear layers of a checkpoint, which give LoRA adapters their size."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from kvasir.checkpoint.tensors import TensorHeader

_ROW = re.compile(r"\.(?:o_proj|out_proj|down_proj|c_proj|dense_4h_to_h|w2|wo)\.|(?:attention|attn)\.dense\.")
"""Layers whose inputs are divided among tensor-parallel ranks; of others, the outputs are."""
_NO_LAYER = re.compile(r"norm|rotary|position_embeddings|\.wpe\.|conv")
_WORD_BITS = 32
_DEFAULT_BITS = 4


@functools.lru_cache(maxsize=4096)
def divides_inputs(name: str) -> bool:
    """Whether tensor parallelism divides the inputs of the linear layer with this weight."""
    return _ROW.search(name) is not None


def linear_sizes(tensor: TensorHeader, quantization: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the inputs and outputs of the linear layer or embedding whose weight `tensor` is, (0, 0) for
    another tensor. `quantization` is the checkpoint's: packed weights have several elements in a word."""
    if len(tensor.shape) != 2 or _NO_LAYER.search(tensor.name):
        return 0, 0
    rows, columns = tensor.shape
    last = tensor.name.rpartition(".")[2]
    if last == "weight":
        return columns, rows
    if last == "weight_packed":
        return columns * _per_word(quantization), rows
    if last == "qweight":
        # AWQ packs along outputs, GPTQ along inputs.
        per_word = _per_word(quantization)
        if str((quantization or {}).get("quant_method")) == "awq":
            return rows, columns * per_word
        return rows * per_word, columns
    return 0, 0


def _per_word(quantization: Mapping[str, Any] | None) -> int:
    stated = quantization or {}
    bits = stated.get("bits") or stated.get("w_bit") or _group_bits(stated) or _DEFAULT_BITS
    return _WORD_BITS // int(bits) if 0 < int(bits) <= _WORD_BITS else 1


def _group_bits(stated: Mapping[str, Any]) -> int:
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and isinstance(weights.get("num_bits"), int):
            return int(weights["num_bits"])
    return 0
