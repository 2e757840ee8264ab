"""Downloads a model into the local cache, in a process of its own, so that a stop can end a download."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvasir.config.load.model_files import resolve_model
from kvasir.core.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Download `SOURCE REVISION`. Return 0 if the files are there."""
    try:
        folder = resolve_model(argv[0], argv[1])
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
