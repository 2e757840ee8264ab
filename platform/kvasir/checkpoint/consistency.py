"""Whether config.json and the weights beside it are of one model.

Files of two models get mixed when a folder is edited or downloaded in parts. vLLM finds out while it loads
weights, by an assertion without a text or by parameters that were not initialized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import LAYERS, count
from kvasir.checkpoint.tensors import TensorHeader

_USUAL = frozenset(
    (
        "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "glm",
        "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe", "llama", "mistral", "mixtral", "olmo",
        "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
        "stablelm", "starcoder2",
    )
)  # fmt: skip
"""Model types whose checkpoints have tensors in each layer, and an embedding for each entry of the
vocabulary, of the model's hidden size."""
_LAYER = re.compile(r"^(?:\w+\.)?(?:layers|h)\.(\d+)\.")
_EMBEDDING = re.compile(r"^(?:\w+\.)?(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_PACKED = {"U8", "I8", "U32", "I32"}


def mismatch(config: ModelConfig, tensors: Iterable[TensorHeader]) -> str | None:
    """Return how the weights differ from `config`, None if they fit, or if the type of the model leaves it
    open. Sizes of tensors within a layer are left to the engine."""
    if not _is_usual(config):
        return None
    last = -1
    for tensor in tensors:
        if found := _LAYER.match(tensor.name):
            last = max(last, int(found[1]))
        elif _EMBEDDING.match(tensor.name) and (problem := _embedding(config, tensor)):
            return problem
    layers = count(config.raw, *LAYERS)
    if 0 <= last < layers - 1:
        return f"config.json has {layers} layers, and the weights have {last + 1}"
    return None


def embedded_tokens(config: ModelConfig) -> int | None:
    """Return how many tokens the model has embeddings of, None if its type leaves it open. A tokenizer may
    have more: gemma-3-1b's has a token for images, which only its larger siblings embed."""
    return (count(config.raw, "vocab_size") or None) if _is_usual(config) else None


def _is_usual(config: ModelConfig) -> bool:
    return config.text is config.raw and config.model_type in _USUAL


def _embedding(config: ModelConfig, tensor: TensorHeader) -> str | None:
    if tensor.dtype in _PACKED:
        named = (config.quantization or {}).get("quant_method")
        return None if named else "its weights are packed as MLX does it, which vLLM does not read"
    wanted = (count(config.raw, "vocab_size"), count(config.raw, *_HIDDEN))
    if len(tensor.shape) != len(wanted) or not all(wanted) or tensor.shape == wanted:
        return None
    names = ("vocab_size", "hidden_size")
    at = 0 if tensor.shape[0] != wanted[0] else 1
    found = f"{tensor.name} in {tensor.file} has {tensor.shape[at]}"
    return f"config.json has {names[at]} {wanted[at]}, and {found}"
