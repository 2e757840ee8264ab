"""The shared secret of routers and workers, read by both."""

from __future__ import annotations

from pathlib import Path

from kvasir.config.spec.deployment import WorkerSpec
from kvasir.core.errors import ConfigError


def session_token(worker: WorkerSpec, token_file: Path | None) -> str | None:
    """Return the secret in `token_file`, else in the spec's `session_token_file`; None if neither is named.

    Raises ConfigError if the file cannot be read or is empty.
    """
    path = token_file or (Path(worker.session_token_file) if worker.session_token_file else None)
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the session token file {path} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"the session token file {path} is empty; write a long random secret into it")
    return token
