"""What the tiny models with random weights that take media have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SEED = 27
TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 6,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
"""The configuration of a language model."""


def save_media_model(
    model: Any,
    config: Any,
    folder: Path,
    renamed: tuple[str, str] | None = None,
) -> None:
    """Write the weights, the same each time. `renamed` is a part of their names, and what it is in published
    checkpoints, where transformers writes another one."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(_SEED)
    model(config).to(torch.float32).eval().save_pretrained(folder, safe_serialization=True)
    if renamed is not None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        save_file({name.replace(*renamed): each for name, each in weights.items()}, path, {"format": "pt"})
