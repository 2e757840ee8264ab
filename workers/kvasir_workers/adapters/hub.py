"""Downloads an adapter from the Hugging Face hub, in a process of its own.

A worker's environment keeps its engine off the hub, and huggingface_hub reads it at import. A process can
also be ended when a download hangs.

    python -m kvasir_workers.adapters.hub REPOSITORY REVISION FOLDER MAX_BYTES FILE…

It writes nothing, or one line of JSON: the code and the message of the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvasir.config.load.hub import download_files
from kvasir.core.errors import ConfigError

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def download(
    repository: str,
    revision: str | None,
    files: Sequence[str],
    folder: Path,
    *,
    max_bytes: int,
    timeout_s: float,
) -> None:
    """Download the `files` of a repository into `folder`. Raise ConfigError, with the codes of
    kvasir.config.load.hub.download_files."""
    environment = {name: value for name, value in os.environ.items() if name not in _OFFLINE}
    arguments = [repository, revision or "", str(folder), str(max_bytes), *files]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "kvasir_workers.adapters.hub", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{repository} was not downloaded within {timeout_s:g} s") from error
    if done.returncode == 0:
        return
    try:
        code, message = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{repository} cannot be downloaded: {last}") from error
    raise ConfigError(message, code=code)


def main(arguments: Sequence[str]) -> int:
    """Download, as the module says. Return the exit status."""
    repository, revision, folder, max_bytes, *files = arguments
    try:
        download_files(repository, revision or None, files, Path(folder), max_bytes=int(max_bytes))
    except ConfigError as error:
        sys.stdout.write(json.dumps([error.code, error.message]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
