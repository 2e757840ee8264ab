"""Folders that several processes share: made by one of them, held while used, removed by any when unused.

A process holds a folder by a shared lock on a file beside it. The kernel releases the lock however the
process ends, so that nothing is left to clean up after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

_LOCK_SUFFIX = ".lock"
_DRAFT_PREFIX = "draft-"
_TRIES = 40
_RETRY_S = 0.05


class SharedFolders:
    """The folders in `root`, which is created. Methods raise OSError where `root` cannot be used, or its file
    system has no locks, and block while another process makes or removes the same folder. `pause` sleeps."""

    def __init__(self, root: Path, pause: Callable[[float], None] = time.sleep) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._pause = pause

    def hold(
        self,
        name: str,
        make: Callable[[Path], None],
        *,
        whole: Callable[[Path], bool] = Path.is_dir,
        waiting: Callable[[], None] = lambda: None,
    ) -> Path:
        """Return the folder `name`, which this process then holds until it ends. If there is none that is
        `whole`, `make` fills an empty folder that takes its place; its exceptions are raised. `waiting` is
        called before waiting for another process that makes the folder."""
        folder = self._root / name
        for _ in range(_TRIES):
            if (lock := self._lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                try:
                    if not whole(folder):
                        self._fill(folder, make)
                finally:
                    os.close(lock)
            elif (lock := self._lock(name, fcntl.LOCK_SH | fcntl.LOCK_NB)) is None:
                waiting()
            else:
                os.close(lock)
            lock = self._lock(name, fcntl.LOCK_SH)
            if lock is not None:
                if whole(folder):
                    os.utime(lock)
                    # The descriptor stays open: it is the hold.
                    return folder
                os.close(lock)
            # Removed again meanwhile, or damaged.
            self._pause(_RETRY_S)
        raise OSError(errno.EBUSY, f"{folder} is damaged, and another process uses it")

    def least_recent(self) -> list[str]:
        """Return the names of all folders, the least recently held first."""
        found = []
        for path in self._root.glob(f"*{_LOCK_SUFFIX}"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path.name.removesuffix(_LOCK_SUFFIX)))
        return [name for _, name in sorted(found)]

    def remove(self, name: str) -> bool:
        """Remove the folder `name`. False if a process holds it, or it is not there."""
        path = self._root / (name + _LOCK_SUFFIX)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(lock, path):
                return False
            shutil.rmtree(self._root / name, ignore_errors=True)
            path.unlink()
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    def _fill(self, folder: Path, make: Callable[[Path], None]) -> None:
        draft = folder.with_name(_DRAFT_PREFIX + folder.name)
        # Of a process that has ended: this one has the lock.
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        draft.mkdir()
        try:
            make(draft)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _lock(self, name: str, kind: int) -> int | None:
        """Return the descriptor of the locked file of `name`. None if `kind` is not to wait and another
        process has the lock, or if another process has removed the file."""
        path = self._root / (name + _LOCK_SUFFIX)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, kind)
            if _is_at(lock, path):
                return lock
        except BlockingIOError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return None


def bytes_in(folder: Path) -> int:
    """Return the bytes that the files below `folder` occupy; files that vanish meanwhile are left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
