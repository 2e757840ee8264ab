"""How many tokens a model makes of an image, from the model's files and the dimensions of the image.

A router computes it, to know the length and the blocks of a prompt without an engine; a worker compares it
with what its engine makes of the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvasir.checkpoint.json_file import read_json_object
from kvasir.checkpoint.model_config import read_model_config
from kvasir.core.errors import ConfigError

_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
_MAX_ASPECT = 200


class ImageRule(Protocol):
    """What a model makes of images. `placeholder` is the token that stands for an image in the chat template,
    and for each of the image's tokens in a prompt."""

    @property
    def placeholder(self) -> int: ...

    def tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of that size in pixels. Raises ValueError with the reason
        for a size that the model does not take."""
        ...


@dataclass(frozen=True, slots=True)
class FixedTokens:
    """Every image is scaled to one size, as in LLaVA, or to one number of queries, as in Aria."""

    placeholder: int
    count: int

    def tokens(self, width: int, height: int) -> int:
        """See ImageRule."""
        return self.count


@dataclass(frozen=True, slots=True)
class GridTokens:
    """An image is scaled to whole cells of `cell` × `cell` pixels, one token each, within bounds of its
    pixels, as in Qwen2-VL (transformers, `smart_resize`)."""

    placeholder: int
    cell: int
    min_pixels: int
    max_pixels: int

    def tokens(self, width: int, height: int) -> int:
        """See ImageRule."""
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise ValueError(f"one side is more than {_MAX_ASPECT} times the other")
        cell, pixels = self.cell, width * height
        rows, columns = round(height / cell), round(width / cell)
        if rows * columns * cell**2 > self.max_pixels:
            scale = math.sqrt(pixels / self.max_pixels)
            rows = max(1, math.floor(height / scale / cell))
            columns = max(1, math.floor(width / scale / cell))
        elif rows * columns * cell**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / pixels)
            rows, columns = math.ceil(height * scale / cell), math.ceil(width * scale / cell)
        return rows * columns


def image_rule(folder: Path) -> ImageRule | None:
    """Return what the model in `folder` makes of images, None for a model that takes none, or of a family
    whose rule is not known. Raises ConfigError, which names the file, for files that cannot be read."""
    raw = read_model_config(folder).raw
    kind = raw.get("model_type")
    if kind == "llava":
        return _fixed(raw)
    if kind == "aria":
        return _queries(raw)
    if kind in _GRIDS:
        return _grid(raw, folder)
    return None


def _fixed(raw: Mapping[str, Any]) -> FixedTokens | None:
    vision = raw.get("vision_config") or {}
    size, patch = vision.get("image_size"), vision.get("patch_size")
    extra = _CLASS_TOKENS.get(str(vision.get("model_type")))
    dropped = {"default": 1, "full": 0}.get(raw.get("vision_feature_select_strategy", "default"))
    placeholder = raw.get("image_token_index", raw.get("image_token_id"))
    if not (isinstance(size, int) and isinstance(patch, int) and isinstance(placeholder, int)):
        return None
    if extra is None or dropped is None or patch < 1:
        return None
    return FixedTokens(placeholder, (size // patch) ** 2 + extra - dropped)


def _queries(raw: Mapping[str, Any]) -> FixedTokens | None:
    placeholder, counts = raw.get("image_token_index"), raw.get("projector_patch_to_query_dict") or {}
    if not (isinstance(placeholder, int) and counts and all(isinstance(n, int) for n in counts.values())):
        return None
    return FixedTokens(placeholder, max(counts.values()))


def _grid(raw: Mapping[str, Any], folder: Path) -> GridTokens | None:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    placeholder = raw.get("image_token_id")
    if not isinstance(placeholder, int):
        return None
    return read_grid(placeholder, read_json_object(path), path)


def read_grid(
    placeholder: int,
    stated: Mapping[str, Any],
    path: Path,
    *,
    least: int | None = None,
    most: int | None = None,
) -> GridTokens:
    """Return the cells of a processor with the settings `stated` in `path`. `least` and `most` are the bounds
    of the pixels where it states none. Raises ConfigError if it states no numbers."""
    size = stated.get("size") or {}
    read: tuple[Any, ...] = (
        stated.get("patch_size"),
        stated.get("merge_size", 2),
        stated.get("min_pixels", size.get("shortest_edge", least)),
        stated.get("max_pixels", size.get("longest_edge", most)),
    )
    if not all(isinstance(each, int) for each in read):
        raise ConfigError(
            f"{path}: it does not say how images are scaled: patch_size, min_pixels, max_pixels"
        )
    patch, merged, fewest, greatest = read
    return GridTokens(placeholder, patch * merged, fewest, greatest)
