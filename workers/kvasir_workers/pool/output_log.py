"""The output of a worker and of its engine's processes, kept in a file of bounded size.

Ray's own files of a worker's output are in its temporary folder, which is removed with a deployment that does
not start. The file replaces standard output and error, which child processes inherit, so that it also has
what native code prints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

LOGS_VARIABLE = "KVASIR_WORKER_LOGS"
"""The environment variable with the folder of the files; without it, the output goes where Ray sends it."""
PATTERN = "worker-*.log"
OWN_NAME = "this is worker"
"""What a worker logs before its name and a comma: by this, its log is found."""
LOG_BYTES = 8 << 20
KEPT = 8
_NAME = re.compile(r"worker-.+-(\d+)\.log(?:\.1)?")


class OutputLog:
    """The file at `path`, and one earlier part of it beside it (`.1`), of at most `limit` bytes each when
    `trim` is called often enough. `emptied` is called when the file begins anew."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self.path = path
        self.emptied: Callable[[], None] = lambda: None
        self._limit = limit
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @classmethod
    def keep(cls, pool: str) -> OutputLog | None:
        """Send the output of this process and its later children to a file of its own; None if no folder is
        named or it cannot be written. Removes files of processes that have ended, but for the newest."""
        folder = os.environ.get(LOGS_VARIABLE)
        if not folder:
            return None
        try:
            prune(Path(folder))
            made = cls(Path(folder) / f"worker-{pool}-{os.getpid()}.log")
        except OSError as error:
            log.warning("the output of this worker is not kept in %s: %s", folder, error.strerror)
            return None
        made.redirect()
        return made

    def redirect(self) -> None:
        """Replace standard output and error by the file."""
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            os.dup2(self._descriptor, number)

    def trim(self) -> None:
        """If the file is too large, keep its end as the earlier part and go on with an empty file: writers
        append, so their next write is at its beginning."""
        size = os.fstat(self._descriptor).st_size
        if size <= self._limit:
            return
        end = os.pread(self._descriptor, self._limit, size - self._limit)
        earlier = self.path.with_name(self.path.name + ".1")
        with contextlib.suppress(OSError):
            descriptor = os.open(earlier, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(end)
        os.ftruncate(self._descriptor, 0)
        self.emptied()


def prune(folder: Path, kept: int = KEPT) -> None:
    """Remove the files of workers that have ended, except for the `kept` newest."""
    ended = []
    for path in folder.iterdir():
        if (name := _NAME.fullmatch(path.name)) is not None and not Path("/proc", name[1]).exists():
            with contextlib.suppress(OSError):
                ended.append((path.stat().st_mtime, path))
    for _, path in sorted(ended, reverse=True)[kept:]:
        path.unlink(missing_ok=True)
