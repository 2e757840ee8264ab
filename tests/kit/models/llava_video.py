"""Makes a tiny LLaVA-NeXT-Video with random weights, for which vLLM needs torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.models.media_tokenizer import make_media_tokenizer
from tests.kit.models.tiny_media import TEXT, save_media_model

IMAGE, VIDEO = "<image>", "<video>"
SIZE, PATCH, STRIDE = 196, 14, 2
"""vLLM divides by whole squares of a patch in a frame's width."""
FRAME_TOKENS = (SIZE // PATCH // STRIDE) ** 2
_TEXT = TEXT | {"model_type": "llama"}
_VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": PATCH,
    "projection_dim": 64,
}


def make_llava_video_model(folder: Path) -> Path:
    """Write the model into `folder`, with the same weights each time, and return it. Does nothing if it is
    there."""
    if (folder / "done").exists():
        return folder
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = make_media_tokenizer(folder, {"image": IMAGE, "video": VIDEO})
    config = transformers.LlavaNextVideoConfig(
        text_config={**_TEXT, "vocab_size": max(ids.values()) + 1},
        vision_config=_VISION,
        image_token_index=ids[IMAGE],
        video_token_index=ids[VIDEO],
        spatial_pool_stride=STRIDE,
        spatial_pool_mode="average",
        image_grid_pinpoints=[[SIZE, SIZE]],
    )
    parts = "vision_tower.", "vision_tower.vision_model."
    save_media_model(transformers.LlavaNextVideoForConditionalGeneration, config, folder, parts)
    size = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config": {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": [[SIZE, SIZE]],
            **size,
        },
        "video_preprocessor_config": {"video_processor_type": "LlavaNextVideoVideoProcessor", **size},
        "processor_config": {
            "processor_class": "LlavaNextVideoProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "done").touch()
    return folder
