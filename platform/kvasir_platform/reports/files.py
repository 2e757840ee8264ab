"""Files that an option of a command line names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvasir.core.errors import ConfigError


def check_folder(path: Path | None, option: str) -> None:
    """Raise ConfigError if `path` cannot become a file: before the work whose result would be lost. None:
    nothing is to be written."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: {path.parent} is not a folder")
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path}: that is a folder; name a file")


def write_file(path: Path, text: str, option: str) -> None:
    """Write what `option` asks for. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from error


def read_json(path: Path, most_bytes: int, where: str) -> Any:
    """Return the file's JSON value. Raises ConfigError, which begins with `where`, if it cannot be read, has
    more bytes, or holds no JSON."""
    try:
        if path.stat().st_size > most_bytes:
            raise ConfigError(f"{where}: larger than {most_bytes >> 20} MiB")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
