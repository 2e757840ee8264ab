"""The output of workers in the output of their pod, where `kubectl logs` shows it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO

from kvasir_workers.pool.output_log import PATTERN

_MOST_BYTES = 1 << 20


class WorkerLogs:
    """Copies what is appended to the logs in `folder` to `out`. Call `step` often."""

    def __init__(self, folder: Path, out: BinaryIO) -> None:
        self._folder = folder
        self._out = out
        self._copied: dict[Path, int] = {}

    def step(self) -> None:
        """Copy what is new, at most 1 MiB of each file."""
        found = sorted(self._folder.glob(PATTERN))
        # Workers remove logs of earlier ones.
        self._copied = {path: self._copied.get(path, 0) for path in found}
        for path in found:
            with contextlib.suppress(OSError):
                self._copy(path)

    def _copy(self, path: Path) -> None:
        with path.open("rb") as stream:
            start = self._copied[path]
            # A worker empties a log that has become too large.
            stream.seek(0 if path.stat().st_size < start else start)
            if data := stream.read(_MOST_BYTES):
                self._out.write(data)
                self._out.flush()
            self._copied[path] = stream.tell()
