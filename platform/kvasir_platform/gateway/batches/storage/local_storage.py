"""Objects as files in a folder: durable, and visible as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvasir.core.errors import CapacityError

_DRAFT = ".draft-"
_TRIES = 8


@contextlib.contextmanager
def _named_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"The storage of files and batches fails at {what}: {error.strerror}.", code="storage_unavailable"
        ) from error


class LocalStorage:
    """ObjectStorage in a folder, which is created, private to the user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """See ObjectStorage: the file is complete and on the disk before it has its name."""
        path = self._folder / key
        with _named_errors(key):
            handle, draft = _draft(path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.writelines(pieces)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(draft, path)
            except BaseException:
                os.unlink(draft)
                raise
            _sync_folder(path.parent)

    def get(self, key: str) -> bytes | None:
        """See ObjectStorage."""
        with _named_errors(key):
            try:
                return (self._folder / key).read_bytes()
            except FileNotFoundError:
                return None

    def remove(self, key: str) -> None:
        """See ObjectStorage."""
        with _named_errors(key), contextlib.suppress(FileNotFoundError):
            path = self._folder / key
            path.unlink()
            with contextlib.suppress(OSError):  # others are in it
                path.parent.rmdir()

    def names(self, folder: str) -> list[str]:
        """See ObjectStorage."""
        with _named_errors(folder):
            try:
                found = os.listdir(self._folder / folder)
            except FileNotFoundError:
                return []
        return sorted(name for name in found if not name.startswith("."))


class FileLease:
    """WorkLease by locks of files, which the kernel releases however a process ends. The file has the number
    of the last token."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def take(self, name: str) -> int | None:
        """See WorkLease."""
        with _named_errors(name):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                token = int(os.pread(handle, 20, 0) or b"0") + 1
                os.pwrite(handle, b"%020d" % token, 0)
                os.fsync(handle)
            except BlockingIOError:
                os.close(handle)
                return None
            except BaseException:
                os.close(handle)
                raise
        self._held[name] = handle
        return token

    def keep(self, name: str) -> bool:
        """See WorkLease: a lock lasts as long as its process."""
        return name in self._held

    def release(self, name: str, *, done: bool) -> None:
        """See WorkLease."""
        handle = self._held.pop(name, None)
        if handle is None:
            return
        with _named_errors(name):
            if done:
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / name).unlink()
            os.close(handle)


def _draft(folder: Path) -> tuple[int, str]:
    """Return a new file in a folder, open and by name. Between the two steps another process may remove the
    folder because it is empty."""
    for _ in range(_TRIES):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return tempfile.mkstemp(prefix=_DRAFT, dir=folder)
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", folder)


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
