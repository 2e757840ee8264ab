"""Draft heads for the shipped model, made of its own first layer: they load and run, and propose little that
the model accepts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

EagleMethod = Literal["eagle", "eagle3"]


def write_eagle_head(model: Path, folder: Path, method: EagleMethod) -> Path:
    """Write a head for `model`, a Llama of at least four layers, into `folder`, which exists."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    first = "model.layers.0."
    layer = {name.removeprefix(first): each for name, each in weights.items() if name.startswith(first)}
    some = layer["self_attn.q_proj.weight"]
    hidden = some.shape[1]
    config: dict[str, Any] = {"num_hidden_layers": 1}
    if method == "eagle":
        tensors = {f"layers.0.{name}": each for name, each in layer.items() if "input_layernorm" not in name}
        tensors["fc.weight"] = torch.eye(hidden, 2 * hidden, dtype=some.dtype)
    else:
        # The attention of an EAGLE-3 head reads the embedding beside the hidden state.
        read = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        tensors = {
            f"midlayer.{name}": torch.cat([each, each], 1) if name.endswith(read) else each
            for name, each in layer.items()
        }
        tensors |= {
            "midlayer.hidden_norm.weight": layer["input_layernorm.weight"].clone(),
            "fc.weight": torch.eye(hidden, 3 * hidden, dtype=some.dtype),
            "norm.weight": weights["model.norm.weight"],
            "lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"]),
        }
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "tie_word_embeddings": False,
            "draft_vocab_size": len(tensors["lm_head.weight"]),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        }
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for file in model.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    stated = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(stated | config), encoding="utf-8")
    return folder


def write_medusa_heads(model: Path, folder: Path, heads: int) -> Path:
    """Write `heads` heads for `model` into `folder`, which exists. Each proposes what the model's own head
    makes of the last hidden state, which is seldom what comes later."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    own = weights.get("lm_head.weight", embedding)
    size, hidden = embedding.shape
    tensors = {}
    for head in range(heads):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(hidden, hidden, dtype=own.dtype)
        tensors[f"lm_heads.{head}.weight"] = own.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": size,
        "num_heads": heads,
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
