"""Makes a tiny vision-language model with random weights: Aria, which vLLM's CPU build runs without
torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.models.media_tokenizer import make_media_tokenizer
from tests.kit.models.tiny_media import TEXT, save_media_model

IMAGE_SIZE, PATCH = 980, 140
IMAGE_TOKENS = 16
"""Tokens of any image."""
PLACEHOLDER = "<image>"
_TEXT = TEXT | {
    "model_type": "aria_text",
    "intermediate_size": 64,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_num_shared_experts": 1,
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
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (placeholder,) = make_media_tokenizer(folder, {"image": PLACEHOLDER}).values()
    config = transformers.AriaConfig(
        text_config={**_TEXT, "vocab_size": placeholder + 1},
        vision_config=_VISION,
        image_token_index=placeholder,
        projector_patch_to_query_dict={(IMAGE_SIZE // PATCH) ** 2: IMAGE_TOKENS},
    )
    save_media_model(transformers.AriaForConditionalGeneration, config, folder)
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
