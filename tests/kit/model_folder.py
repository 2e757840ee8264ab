"""Made-up model folders: headers of any shape, and as few bytes of weights as the format allows."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BITS = {"F4": 4, "U8": 8, "I8": 8, "F8_E4M3": 8, "F16": 16, "BF16": 16, "I32": 32, "F32": 32, "I64": 64}

TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}}}'
"""The least that is taken for a tokenizer.json."""

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and shape of each tensor by name."""


def write_safetensors(path: Path, tensors: Tensors, *, missing_bytes: int = 0) -> None:
    """Write a sparse file with `tensors`, whose last `missing_bytes` are cut off."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end - missing_bytes)


def write_model(folder: Path, config: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    """Write a folder that a deployment can name: configuration, one weight file, a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(TOKENIZER, encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors or {"w": ("BF16", (2,))})
    return folder
