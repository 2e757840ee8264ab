"""JSON objects of a model folder, with errors that name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvasir.core.errors import ConfigError

T = TypeVar("T")

JSON_LIMIT_BYTES = 256 << 20
"""Larger files are refused: the largest indices of tensors known have 20 MiB."""

LFS_POINTER = b"version https://git-lfs"
"""How a file begins whose content Git LFS has not fetched."""


def refuse_lfs_pointer(path: Path, beginning: bytes) -> None:
    """Raise ConfigError if `path`, which has this `beginning`, only names a file that is in Git LFS."""
    if beginning.startswith(LFS_POINTER):
        raise ConfigError(
            f"{path} is a pointer of Git LFS and not the file itself; fetch the files: "
            f"git -C {path.parent} lfs pull"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in `path`. Raises ConfigError as `read_json` does."""
    return read_json(path, dict[str, Any])


def read_json(path: Path, kind: type[T]) -> T:
    """Return the content of `path`. Raises ConfigError for a file that is missing, cannot be read, is larger
    than JSON_LIMIT_BYTES, is a pointer of Git LFS, or is not of that `kind`."""
    try:
        if (size := path.stat().st_size) > JSON_LIMIT_BYTES:
            raise ConfigError(f"{path}: {size} bytes are too many for a JSON file of a model")
        content = path.read_bytes()
        refuse_lfs_pointer(path, content)
        return msgspec.json.decode(content, type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
