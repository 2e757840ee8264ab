"""Makes a tiny vision-language model with random weights: Aria, which vLLM's CPU build runs without
torchvision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kvasir.config.load.model_files import resolve_model

_SEED = 27
IMAGE_SIZE, PATCH = 980, 140
IMAGE_TOKENS = 16
"""Tokens of any image."""
PLACEHOLDER = "<image>"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "model_type": "aria_text",
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_num_shared_experts": 1,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 6,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "model_type": "idefics3_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}


def make_vision_model(folder: Path) -> Path:
    """Write the model into `folder`, with the same weights each time, and return it. Does nothing if it is
    there."""
    if (folder / "done").exists():
        return folder
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    placeholder = make_vision_tokenizer(folder)
    config = transformers.AriaConfig(
        text_config={**_TEXT, "vocab_size": placeholder + 1},
        vision_config=_VISION,
        image_token_index=placeholder,
        projector_patch_to_query_dict={(IMAGE_SIZE // PATCH) ** 2: IMAGE_TOKENS},
    )
    torch.manual_seed(_SEED)
    made = transformers.AriaForConditionalGeneration(config).to(torch.float32).eval()
    made.save_pretrained(folder, safe_serialization=True)
    pixels = {
        "image_processor_type": "AriaImageProcessor",
        "max_image_size": IMAGE_SIZE,
        "min_image_size": PATCH,
        "split_image": False,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    processor = {"processor_class": "AriaProcessor", "size_conversion": {str(IMAGE_SIZE): IMAGE_TOKENS}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "done").touch()
    return folder


def make_vision_tokenizer(folder: Path) -> int:
    """Write the tokenizer of kvasir-tiny into `folder`, with a special token that stands for an image and a
    chat template that has it, and return its id."""
    source = resolve_model("kvasir-tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, folder / name)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    number: int = 1 + max(
        *tokenizer["model"]["vocab"].values(), *(each["id"] for each in tokenizer["added_tokens"])
    )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": number, "content": PLACEHOLDER, "special": True, **flags})
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"extra_special_tokens": {"image_token": PLACEHOLDER}}
    del config["chat_template"]
    path.write_text(json.dumps(config))
    return number
