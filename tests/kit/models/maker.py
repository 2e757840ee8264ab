"""Makes tiny models with random weights: a folder with configuration, weights and tokenizer, as a user has
it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.kit.models.architectures import TinyModel
from tests.kit.models.packing import PACKERS

from kvasir.config.load.model_files import resolve_model

_SEED = 20
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
RANK = 8
_BEGIN, _END = "<|bos|>", "<|end|>"
_AROUND = {_BEGIN: 0, _END: 6}


def make_model(model: TinyModel, folder: Path) -> Path:
    """Write `model` into `folder`, with the same weights each time, and return it. Does nothing if it is
    there."""
    if (folder / "done").exists():
        return folder
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, model.config)(**model.values)
    torch.manual_seed(_SEED)
    made = getattr(transformers, model.architecture)(config).to(torch.float32).eval()
    made.save_pretrained(folder, safe_serialization=True)
    if model.quantization:
        _quantize(model.quantization, folder)
    _copy_tokenizer(folder, template=model.template)
    if model.kind == "classifies":
        _separate_pairs(folder)
    (folder / "done").touch()
    return folder


def make_adapter(model: TinyModel, folder: Path) -> Path:
    """Write a LoRA adapter of `make_model`'s weights into `folder`, with random weights, and return it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(_SEED + 1)
    hidden, head = model.values["hidden_size"], model.values.get("head_dim", 32)
    sizes = {
        "self_attn.q_proj": (hidden, model.values["num_attention_heads"] * head),
        "self_attn.v_proj": (hidden, model.values["num_key_value_heads"] * head),
        "self_attn.o_proj": (model.values["num_attention_heads"] * head, hidden),
    }
    tensors = {}
    for layer in range(model.values["num_hidden_layers"]):
        for name in model.adapts:
            width, out = sizes[name]
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, width) * 0.2
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, RANK) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    adapted = sorted({name.rpartition(".")[2] for name in model.adapts})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": adapted}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none"}))
    return folder


def _copy_tokenizer(folder: Path, *, template: bool) -> None:
    source = resolve_model("kvasir-tiny")
    for name in _TOKENIZER:
        shutil.copyfile(source / name, folder / name)
    _adopt_rules(folder)
    if not template:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        del config["chat_template"]
        path.write_text(json.dumps(config))


def _separate_pairs(folder: Path) -> None:
    """Let the tokenizer encode two texts as BERT's does: tokens between and behind them, and types."""
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text())
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in _AROUND.items()}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    begin, end, last = (
        {"SpecialToken": {"id": name, "type_id": number}}
        for name, number in ((_BEGIN, 0), (_END, 0), (_END, 1))
    )
    pair = [begin, first, end, second, last]
    rules["post_processor"] = {
        "type": "TemplateProcessing", "single": pair[:3], "pair": pair, "special_tokens": special,
    }  # fmt: skip
    path.write_text(json.dumps(rules, ensure_ascii=False))
    path = folder / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_input_names": names}))


def _adopt_rules(folder: Path) -> None:
    """Let tokenizer.json have the rules that transformers takes for the model type, as published models have:
    for some, such as qwen2, it does not read them from the file."""
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    path = folder / "tokenizer.json"
    kept, taken = json.loads(path.read_text()), json.loads(loaded.to_str())
    rules = ("normalizer", "pre_tokenizer", "decoder")
    if any(kept[rule] != taken[rule] for rule in rules):
        path.write_text(json.dumps({**kept, **{rule: taken[rule] for rule in rules}}, ensure_ascii=False))


def _quantize(how: str, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    pack, settings = PACKERS[how]
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        linear = ".layers." in name and name.endswith("_proj.weight")
        tensors.update(pack(name.removesuffix(".weight"), tensor) if linear else {name: tensor.bfloat16()})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": settings}, indent=2))
