"""Makes a checkpoint of some size in several files, to measure how long workers take to read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kvasir.config.load.model_files import resolve_model

_HIDDEN, _WIDTH, _HEADS, _HEAD_DIM = 2048, 5632, 16, 128
_SEED = 24


def make_sharded(folder: Path, layers: int) -> Path:
    """Write a Llama of 105 MB of bfloat16 for each of `layers`, a file a layer, and return `folder`. The
    weights are random and small, so that the model computes with finite numbers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    source = resolve_model("kvasir-tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = config["vocab_size"]
    generator = torch.Generator().manual_seed(_SEED)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    files = {"outer": {"model.embed_tokens.weight": random(vocabulary, _HIDDEN)}}
    files["outer"]["model.norm.weight"] = torch.ones(_HIDDEN).bfloat16()
    files["outer"]["lm_head.weight"] = random(vocabulary, _HIDDEN)
    shapes = {f"self_attn.{name}_proj": (_HIDDEN, _HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (_WIDTH, _HIDDEN), "mlp.up_proj": (_WIDTH, _HIDDEN)}
    shapes["mlp.down_proj"] = (_HIDDEN, _WIDTH)
    weight_map: dict[str, str] = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors = {f"{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(_HIDDEN).bfloat16()
        files[f"layer-{layer:03}"] = tensors
    for name, tensors in files.items():
        file = f"model-{name}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
