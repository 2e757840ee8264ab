"""A private filesystem that can be made full and read-only, for tests and load tests.

It is in memory, and its size can change while it is in use, so that filling it costs nothing. Needs root.
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
    """None if a filesystem can be mounted here, otherwise what is missing."""
    if os.geteuid() != 0:
        return "only root can mount a filesystem"
    with tempfile.TemporaryDirectory(prefix="kvasir-disk-") as folder:
        try:
            with SmallDisk(Path(folder), 1 << 20):
                return None
        except ConfigError as error:
            return str(error)


class SmallDisk:
    """`size` bytes at the empty folder `path`, for the owner alone, until the context ends. Raises
    RuntimeError if a fault does not happen. All calls block."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._size = size

    def __enter__(self) -> Self:
        """Mount it. Raise ConfigError if mounting is not possible."""
        command = ["-t", "tmpfs", "-o", f"size={self._size},mode=0700", "kvasir-lab", str(self.path)]
        if problem := _run("mount", *command):
            raise ConfigError(f"no filesystem can be mounted at {self.path}: {problem}")
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "--lazy", str(self.path))

    def fill(self) -> None:
        """Leave no free space, and verify that writes fail."""
        self._until(self._shrink, ENOSPC)

    def grow(self) -> None:
        """Release the space that `fill` took."""
        self._remount(f"size={self._size}")

    def forbid_writes(self) -> None:
        """Make it read-only, and verify that writes fail."""
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
        """Apply `change` until writes are refused with `refusal`; a concurrent writer may block it."""
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
    """The command's error output; "" on success. Raise OSError if there is no such command."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
