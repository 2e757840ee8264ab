"""Makes tiny models with random weights that take videos: Qwen2-VL and Qwen2.5-VL, for which vLLM needs
torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.models.media_tokenizer import make_media_tokenizer
from tests.kit.models.tiny_media import TEXT, save_media_model

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
PATCH, MERGE, TOGETHER = 14, 2, 2
CELL = PATCH * MERGE
"""Pixels of a token's width and height."""
_TEXT = TEXT | {
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0},
}
_VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": TOGETHER,
    "initializer_range": 0.2,
}


_OWN: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 64, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2},
    "Qwen2_5_VL": {
        "hidden_size": 64,
        "out_hidden_size": TEXT["hidden_size"],
        "intermediate_size": 128,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 4,
    },
}
"""What the vision configurations of the families differ in."""


def make_video_model(folder: Path, family: str) -> Path:
    """Write the model of a `family`, Qwen2VL or Qwen2_5_VL, into `folder`, with the same weights each time,
    and return it. Does nothing if it is there."""
    if (folder / "done").exists():
        return folder
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_media_tokenizer(folder, {"image": IMAGE, "video": VIDEO}, "<|vision_start|>", "<|vision_end|>")
    config = getattr(transformers, f"{family}Config")(
        text_config={**_TEXT, "vocab_size": max(ids.values()) + 1},
        vision_config=_VISION | _OWN[family],
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    save_media_model(getattr(transformers, f"{family}ForConditionalGeneration"), config, folder)
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{family}Processor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TOGETHER,
        "min_pixels": 4 * CELL**2,
        "max_pixels": 64 * CELL**2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "done").touch()
    return folder
