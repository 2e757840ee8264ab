"""Files that an option of a command line names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvasir.core.errors import ConfigError


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
