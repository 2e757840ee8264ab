"""How many tokens a model makes of a video, from the model's files, and the dimensions and the number of the
frames that are taken of the video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvasir.checkpoint.json_file import read_json_object
from kvasir.checkpoint.media.images import GridTokens, read_grid
from kvasir.core.errors import ConfigError

_GRIDS = ("qwen2_vl", "qwen2_5_vl")
_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_MIN_PIXELS, _MAX_PIXELS, _MAX_TOKENS = 128 * 28 * 28, 768 * 28 * 28, 128_000
"""What transformers takes where the files are silent."""


class VideoRule(Protocol):
    """What a model makes of videos. `placeholder` is the token that stands for a video in the chat template,
    and for each of the video's tokens in a prompt."""

    @property
    def placeholder(self) -> int: ...

    def tokens(self, width: int, height: int, frames: int) -> int:
        """Return the number of tokens of that many frames of that size in pixels. Raises ValueError with the
        reason for a size that the model does not take."""
        ...


@dataclass(frozen=True, slots=True)
class PooledFrames:
    """Every frame is scaled to one size and has `count` tokens, as in LLaVA-NeXT-Video."""

    placeholder: int
    count: int

    def tokens(self, width: int, height: int, frames: int) -> int:
        """See VideoRule."""
        return self.count * frames


@dataclass(frozen=True, slots=True)
class GridFrames:
    """Frames are scaled like images, and `together` of them share their tokens, as in Qwen2-VL (transformers,
    Qwen2VLVideoProcessor). With `most_tokens`, each frame has an even share of the pixels of that many
    tokens."""

    grid: GridTokens
    together: int
    most_tokens: int | None = None

    @property
    def placeholder(self) -> int:
        """See VideoRule."""
        return self.grid.placeholder

    def tokens(self, width: int, height: int, frames: int) -> int:
        """See VideoRule."""
        grid = self.grid
        if self.most_tokens is not None:
            shared = int(self.most_tokens * grid.cell**2 * 0.9) * self.together // frames
            most = max(min(grid.max_pixels, shared), int(grid.min_pixels * 1.05))
            grid = GridTokens(grid.placeholder, grid.cell, grid.min_pixels, most)
        return -(-frames // self.together) * grid.tokens(width, height)


def video_rule(raw: Mapping[str, Any], folder: Path) -> VideoRule | None:
    """Return what the model in `folder` with the configuration `raw` makes of videos, None for a model that
    takes none, or of a family whose rule is not known. Raises ConfigError, which names the file, for files
    that cannot be read."""
    kind = raw.get("model_type")
    if kind == "llava_next_video":
        return _pooled(raw)
    return _grid(raw, folder) if kind in _GRIDS else None


def _pooled(raw: Mapping[str, Any]) -> PooledFrames | None:
    vision = raw.get("vision_config") or {}
    read: tuple[Any, ...] = (
        raw.get("video_token_index", raw.get("video_token_id")),
        vision.get("image_size"),
        vision.get("patch_size"),
        raw.get("spatial_pool_stride", 2),
    )
    if not all(isinstance(each, int) and each > 0 for each in read):
        return None
    placeholder, size, patch, stride = read
    return PooledFrames(placeholder, (-(-(size // patch) // stride)) ** 2)


def _grid(raw: Mapping[str, Any], folder: Path) -> GridFrames | None:
    path = next((path for name in _FILES if (path := folder / name).is_file()), None)
    placeholder = raw.get("video_token_id")
    if path is None or not isinstance(placeholder, int):
        return None
    stated = read_json_object(path)
    grid = read_grid(placeholder, {"patch_size": 14, **stated}, path, least=_MIN_PIXELS, most=_MAX_PIXELS)
    together, most = stated.get("temporal_patch_size", 2), stated.get("max_video_tokens", _MAX_TOKENS)
    if not (isinstance(together, int) and together > 0 and isinstance(most, int)):
        raise ConfigError(f"{path}: temporal_patch_size or max_video_tokens is no number")
    if stated.get("do_sample_frames"):
        # The processor would take others than the frames that it is given.
        return None
    return GridFrames(grid, together, most if stated.get("cap_pixels_per_frame") else None)
