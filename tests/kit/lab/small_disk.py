"""A real filesystem of one's own that can be made full and read-only, for tests and loads.

It lies in memory, and its size is changed under whoever uses it: what fills it costs nothing. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from errno import ENOSPC, EROFS
from pathlib import Path
from typing import Self

from kvasir.core.errors import ConfigError

_SETTLED_S = 5.0
_POLL_S = 0.005


def available() -> str | None:
    """None when a filesystem can be mounted here, else what is missing."""
    if os.geteuid() != 0:
        return "only root can mount a filesystem"
    with tempfile.TemporaryDirectory(prefix="kvasir-disk-") as folder:
        try:
            with SmallDisk(Path(folder), 1 << 20):
                return None
        except ConfigError as error:
            return str(error)


class SmallDisk:
    """`size` bytes at the empty folder `path`, from entry to exit, for its owner alone. A fault that does not
    happen raises RuntimeError. Everything here blocks."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._size = size

    def __enter__(self) -> Self:
        """Raises ConfigError where nothing can be mounted."""
        command = ["-t", "tmpfs", "-o", f"size={self._size},mode=0700", "kvasir-lab", str(self.path)]
        if problem := _run("mount", *command):
            raise ConfigError(f"no filesystem can be mounted at {self.path}: {problem}")
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "--lazy", str(self.path))

    def fill(self) -> None:
        """Leave no room, and see that nothing more can be written."""
        self._until(self._shrink, ENOSPC)

    def grow(self) -> None:
        """Give back the room that `fill` took."""
        self._remount(f"size={self._size}")

    def forbid_writes(self) -> None:
        """Make it read-only, and see that nothing more can be written."""
        self._until(lambda: self._remount("ro"), EROFS)

    def allow_writes(self) -> None:
        """Make it writable again."""
        self._remount("rw")

    def _shrink(self) -> None:
        found = os.statvfs(self.path)
        self._remount(f"size={(found.f_blocks - found.f_bfree) * found.f_frsize}")

    def _remount(self, options: str) -> None:
        if problem := _run("mount", "-o", f"remount,{options}", str(self.path)):
            raise RuntimeError(f"{self.path} cannot be mounted with {options}: {problem}")

    def _until(self, change: Callable[[], None], refusal: int) -> None:
        """Change it until a write is refused so: somebody may be writing just then, and be in the way."""
        deadline = time.monotonic() + _SETTLED_S
        while True:
            problem = None
            try:
                change()
                with tempfile.TemporaryFile(dir=self.path, buffering=0) as probe:
                    probe.write(b"x")
            except RuntimeError as error:
                problem = error
            except OSError as error:
                if error.errno == refusal:
                    return
                raise
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.path} takes writes all the same") from problem
            time.sleep(_POLL_S)


def _run(*command: str) -> str:
    """What it complained of; "" when it went well. Raises OSError when there is no such command."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
