"""Reads profiles, for the router, `kvasir check`, `kvasir plan` and `kvasir sim`."""

from __future__ import annotations

from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir.performance.profile import CalibratedProfile, decode_profile

_LIMIT_BYTES = 1 << 20


def read_profile(path: Path) -> CalibratedProfile:
    """Return the profile in a file. Raises ConfigError, which names the file."""
    try:
        with path.open("rb") as stream:
            content = stream.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if len(content) > _LIMIT_BYTES:
        raise ConfigError(f"{path}: over {_LIMIT_BYTES >> 10} KiB, so it is no profile")
    return decode_profile(content, str(path))
