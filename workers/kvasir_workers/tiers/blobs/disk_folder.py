"""One engine's folder of blobs on a disk: its lock, atomic writes, and the listing of its files.

    PATH/slot-K/lock                    held locked by the engine that uses the folder
    PATH/slot-K/kvVERSION-FINGERPRINT/ab/KEY    a blob, in a folder by the first byte of its key
    PATH/slot-K/kvVERSION-FINGERPRINT/incoming

The lock ends with its process, so that an engine that starts takes over the folder of a killed one: a folder
with its own fingerprint first, else any unused one, whose blobs of other kinds it deletes. A file is written
under another name and renamed, but not synced: a power failure may tear it, which its checksums detect.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from errno import EBADF, EEXIST, EPERM
from pathlib import Path

from kvasir.ports.tier import KEY_BYTES
from kvasir_workers.tiers.blob import HEADER_BYTES, VERSION

FANS = 256
_SLOTS = 1024
_KIND = re.compile(r"kv\d+-[0-9a-f]{32}")
_PIECE_BYTES = 8 << 20
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC


class BlobFolder:
    """The folder of this engine, from `claim` to `close`. Methods raise OSError."""

    def __init__(self, slot: Path, kind: str, lock: int) -> None:
        self._slot = slot
        self._kind = slot / kind
        self._incoming = self._kind / "incoming"
        self._lock = lock

    @classmethod
    def claim(cls, path: str, fingerprint: bytes) -> BlobFolder:
        """Claim a folder under `path`, creating what is missing with access for this user only. Raise
        OSError, also if others could write to it."""
        root = Path(path)
        root.mkdir(0o700, parents=True, exist_ok=True)
        kind = f"kv{VERSION}-{fingerprint.hex()}"
        slots = [root / f"slot-{number}" for number in range(_SLOTS)]
        slots.sort(key=lambda slot: (not (slot / kind).exists(), not slot.exists()))
        for slot in slots:
            lock = _lock(slot)
            if lock is not None:
                folder = cls(slot, kind, lock)
                try:
                    _own_folder(slot / kind)
                except OSError:
                    folder.close()
                    raise
                return folder
        raise OSError(EEXIST, "all of its subfolders are in use", path)

    @property
    def path(self) -> Path:
        """The folder of its blobs."""
        return self._kind

    def alive(self) -> bool:
        """Return whether the folder is still the one that was locked, and can be listed."""
        try:
            os.listdir(self._kind)
            return os.path.samestat(os.stat(self._slot / "lock"), os.fstat(self._lock))
        except OSError:
            return False

    def write(self, key: bytes, header: bytes, data: memoryview) -> None:
        """Store a blob under its key. After an error no part of it remains."""
        try:
            with _opened(self._incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                _write_all(file, header, data)
            target = self._file(key)
            try:
                os.rename(self._incoming, target)
            except FileNotFoundError:
                target.parent.mkdir(0o700)
                os.rename(self._incoming, target)
        except OSError:
            self._discard()
            raise

    def try_room(self, size: int) -> None:
        """Raise OSError if a file of this size cannot be written."""
        try:
            with _opened(self._incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                os.posix_fallocate(file, 0, size)
        finally:
            self._discard()

    def read_header(self, key: bytes) -> tuple[bytes, int]:
        """Return a blob's header, and the size of its file."""
        with _opened(self._file(key), os.O_RDONLY) as file:
            return os.read(file, HEADER_BYTES), os.fstat(file).st_size

    def read(self, key: bytes, target: memoryview, check: Callable[[], None]) -> tuple[bytes, int]:
        """Fill `target` with what follows the header, if the file has exactly the size of both, in bounded
        pieces with a `check` before each, which may raise. Return the header and the size of the file."""
        with _opened(self._file(key), os.O_RDONLY) as file:
            header, size = os.read(file, HEADER_BYTES), os.fstat(file).st_size
            at = 0 if size == HEADER_BYTES + target.nbytes else target.nbytes
            while at < target.nbytes:
                check()
                count = os.readv(file, [target[at : at + _PIECE_BYTES]])
                if not count:
                    return header, HEADER_BYTES + at
                at += count
            return header, size

    def delete(self, key: bytes) -> None:
        """Delete a blob, ignoring errors: a blob that cannot be deleted is not used either."""
        with contextlib.suppress(OSError):
            self._file(key).unlink()

    def keys(self, fan: int) -> list[bytes]:
        """Return the keys of all blobs whose key begins with this byte. Deletes files whose name is not a
        blob's."""
        found = []
        try:
            names = os.listdir(self._kind / f"{fan:02x}")
        except FileNotFoundError:
            return []
        for name in names:
            try:
                key = bytes.fromhex(name)
            except ValueError:
                key = b""
            if len(key) == KEY_BYTES and key[0] == fan and key.hex() == name:
                found.append(key)
            else:
                (self._kind / f"{fan:02x}" / name).unlink()
        return found

    def purge(self) -> Iterator[None]:
        """Delete blobs of other kinds, and remains of interrupted writes, yielding periodically."""
        self._discard()
        for kind in self._slot.iterdir():
            if kind == self._kind or not _KIND.fullmatch(kind.name):
                continue
            for fan in kind.iterdir():
                if not fan.is_dir():
                    fan.unlink()
                    continue
                for file in fan.iterdir():
                    file.unlink()
                    yield
                fan.rmdir()
            kind.rmdir()

    def close(self) -> None:
        """Release the folder; its contents remain."""
        os.close(self._lock)

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return Path(f"{self._kind}/{name[:2]}/{name}")

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            self._incoming.unlink()


def _lock(slot: Path) -> int | None:
    """Lock this slot and return the lock; None if another engine has it."""
    _own_folder(slot)
    # Opened for reading, it does not prevent a remount as read-only, and works on one. Only NFS requires
    # opening for writing to lock.
    for mode in (os.O_RDONLY, os.O_RDWR):
        lock = os.open(slot / "lock", mode | os.O_CREAT | _NO_LINKS, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        except OSError as error:
            os.close(lock)
            if error.errno != EBADF or mode == os.O_RDWR:
                raise
        else:
            return lock
    return None


def _own_folder(path: Path) -> None:
    """Create the folder if it is missing, and make sure that only this user can write to it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(EPERM, "not a folder of this user that nobody else may write to", str(path))


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | _NO_LINKS, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _write_all(file: int, header: bytes, data: memoryview) -> None:
    left = [memoryview(header), data]
    while left:
        count = os.writev(file, left)
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
