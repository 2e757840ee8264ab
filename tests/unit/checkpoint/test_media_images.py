"""How many tokens models make of images, by their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.media.images import FixedTokens, GridTokens, image_rule
from kvasir.core.errors import ConfigError

CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}


def folder(path: Path, config: dict[str, Any], pixels: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if pixels is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(pixels))
    return path


@pytest.mark.parametrize(
    ("vision", "strategy", "count"),
    [(CLIP, "default", 576), (CLIP, "full", 577), (SIGLIP, "full", 729), (SIGLIP, "default", 728)],
)
def test_llava_scales_every_image_to_one_size(tmp_path: Path, vision: Any, strategy: str, count: int) -> None:
    config = {
        "model_type": "llava",
        "image_token_index": 32_000,
        "vision_config": vision,
        "vision_feature_select_strategy": strategy,
    }
    rule = image_rule(folder(tmp_path, config))
    assert rule == FixedTokens(32_000, count)
    assert rule.tokens(1, 1) == rule.tokens(4000, 20) == count


@pytest.mark.parametrize(
    ("width", "height", "cells"),
    # As transformers' smart_resize has them, with these bounds.
    [
        (28, 28, 4),
        (640, 480, 23 * 17),
        (480, 640, 23 * 17),
        (1920, 1080, 42 * 23),
        (42, 42, 4),
        (70, 70, 4),
        (4000, 20, 143),
    ],
)
def test_qwen_scales_images_to_whole_cells(tmp_path: Path, width: int, height: int, cells: int) -> None:
    config = {"model_type": "qwen2_vl", "image_token_id": 151_655}
    pixels = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 28 * 28 * 1000}
    rule = image_rule(folder(tmp_path, config, pixels))
    assert rule == GridTokens(151_655, 28, 3136, 784_000)
    assert rule.tokens(width, height) == cells


def test_an_image_that_is_too_long_for_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 200 times"):
        GridTokens(1, 28, 3136, 784_000).tokens(4001, 20)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llava", "image_token_index": 1, "vision_config": {"model_type": "pixtral"}},
        {"model_type": "llava", "image_token_index": 1, "vision_config": {**CLIP, "model_type": "other"}},
        {"model_type": "qwen2_vl", "image_token_id": 1},
    ],
)
def test_a_model_without_a_known_rule_takes_no_images(tmp_path: Path, config: dict[str, Any]) -> None:
    assert image_rule(folder(tmp_path, config)) is None


def test_files_that_do_not_say_how_images_are_scaled_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: it does not say"):
        image_rule(folder(tmp_path, {"model_type": "qwen2_vl", "image_token_id": 1}, {"patch_size": 14}))


def test_aria_has_one_number_of_tokens_for_its_largest_grid(tmp_path: Path) -> None:
    config = {
        "model_type": "aria",
        "image_token_index": 9,
        "projector_patch_to_query_dict": {"1225": 128, "4900": 256},
    }
    assert image_rule(folder(tmp_path, config)) == FixedTokens(9, 256)
    assert image_rule(folder(tmp_path, {**config, "projector_patch_to_query_dict": None})) is None
