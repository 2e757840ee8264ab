"""How many tokens models make of videos and audio, by their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.checkpoint.media.audio import HalvedFrames
from kvasir.checkpoint.media.images import GridTokens
from kvasir.checkpoint.media.rules import MediaRules, media_rules
from kvasir.checkpoint.media.videos import GridFrames, PooledFrames
from kvasir.core.errors import ConfigError
from kvasir.core.media.prompts import MediaKind

QWEN = {"model_type": "qwen2_vl", "image_token_id": 151_655, "video_token_id": 151_656}
PIXELS = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 784_000}
HEARD = {"model_type": "qwen2_audio", "audio_token_index": 7}


def rules(path: Path, config: dict[str, Any], **files: dict[str, Any]) -> MediaRules:
    (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return media_rules(path)


def test_qwen_scales_frames_like_images_and_joins_pairs_of_them(tmp_path: Path) -> None:
    rule = rules(tmp_path, QWEN, preprocessor_config=PIXELS).video
    assert rule == GridFrames(GridTokens(151_656, 28, 3136, 784_000), 2)
    assert [rule.tokens(640, 480, frames) for frames in (1, 2, 3, 32)] == [391, 391, 782, 16 * 391]


def test_bounds_of_a_video_processor_hold_before_those_of_images(tmp_path: Path) -> None:
    own = {"temporal_patch_size": 4, "size": {"shortest_edge": 3136, "longest_edge": 784 * 10}}
    rule = rules(tmp_path, QWEN, preprocessor_config=PIXELS, video_preprocessor_config=own).video
    assert rule is not None
    assert rule.tokens(640, 480, 8) == 2 * 3 * 2
    silent = rules(tmp_path, QWEN, video_preprocessor_config={}).video
    assert silent == GridFrames(GridTokens(151_656, 28, 128 * 784, 768 * 784), 2)


def test_a_cap_on_the_whole_video_leaves_each_frame_an_even_share(tmp_path: Path) -> None:
    capped = {**PIXELS, "cap_pixels_per_frame": True, "max_video_tokens": 1000}
    rule = rules(tmp_path, QWEN, preprocessor_config=capped).video
    assert rule is not None
    # As Qwen2VLVideoProcessor.resize: 900 tokens' pixels, times two, over the frames.
    assert [rule.tokens(640, 480, frames) for frames in (2, 20, 200)] == [391, 10 * 80, 100 * 6]


def test_llava_next_video_pools_the_patches_of_each_frame(tmp_path: Path) -> None:
    config = {
        "model_type": "llava_next_video",
        "video_token_index": 5,
        "spatial_pool_stride": 2,
        "vision_config": {"image_size": 336, "patch_size": 14},
    }
    found = rules(tmp_path, config)
    assert found == MediaRules(video=PooledFrames(5, 144))
    assert found.video is not None
    assert found.video.tokens(1, 1, 8) == 8 * 144


@pytest.mark.parametrize(
    ("samples", "tokens"), [(16_000, 25), (480_000, 750), (1600, 2), (8000, 12), (16_001, 25), (320, 0)]
)
def test_qwen_audio_halves_the_frames_of_the_spectrum_twice(
    tmp_path: Path, samples: int, tokens: int
) -> None:
    rule = rules(tmp_path, HEARD, preprocessor_config={"hop_length": 160}).audio
    assert rule == HalvedFrames(7, 16_000, 160, 480_000)
    if tokens:
        assert rule.tokens(samples) == tokens
        return
    with pytest.raises(ValueError, match="too short"):
        rule.tokens(samples)


def test_audio_beyond_what_the_model_hears_is_refused_and_not_cut(tmp_path: Path) -> None:
    rule = rules(tmp_path, HEARD, preprocessor_config={"chunk_length": 10}).audio
    assert rule is not None
    with pytest.raises(ValueError, match=r"it has 12\.5 s; the model hears 10 s"):
        rule.tokens(200_000)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "qwen2_vl", "image_token_id": 1},
        {"model_type": "qwen3_vl", "image_token_id": 1, "video_token_id": 2},
        {"model_type": "llava_next_video", "video_token_index": 5, "vision_config": {"image_size": 336}},
        {"model_type": "ultravox", "audio_token_index": 7},
        {"model_type": "qwen2_audio"},
    ],
)
def test_a_model_without_a_known_rule_takes_neither_videos_nor_audio(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    found = rules(tmp_path, config, preprocessor_config=PIXELS)
    assert (found.video, found.audio) == (None, None)
    assert set(found.placeholders) <= {MediaKind.IMAGE}


def test_a_processor_that_takes_frames_itself_has_no_rule(tmp_path: Path) -> None:
    assert rules(tmp_path, QWEN, preprocessor_config={**PIXELS, "do_sample_frames": True}).video is None


@pytest.mark.parametrize(
    ("config", "stated", "reason"),
    [
        (QWEN, {"patch_size": "big"}, "patch_size"),
        (QWEN, {**PIXELS, "temporal_patch_size": 0}, "temporal_patch_size"),
        (HEARD, {"hop_length": "x"}, "hop_length"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, config: Any, stated: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"preprocessor_config\.json.*{reason}"):
        rules(tmp_path, config, preprocessor_config=stated)
