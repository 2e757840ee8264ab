"""A copy of a model on a disk of the node, for models on a volume that is slower or shared by many nodes.

The first worker of a node copies; the others wait, and all read the same files, so that the volume is read
once per node and the page cache is shared. Copies that no worker uses are removed when another needs their
room.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kvasir.core.errors import ConfigError
from kvasir.core.size_text import size_text
from kvasir_workers.engines.vllm.caches.shared_folders import SharedFolders

log = logging.getLogger(__name__)

_PIECE_BYTES = 16 << 20
_KEPT_FREE = 0.05
"""Share of the disk that copies leave free, for everything else that writes there."""
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Formats that engines do not read where there are safetensors files."""
_SKIPPED_FOLDERS = {"original", "onnx"}


@dataclass(frozen=True, slots=True)
class _Item:
    """A file of a model, by its path in the folder."""

    path: Path
    size: int
    changed_ns: int


def node_copy(source: Path, cache: Path, threads: int) -> Path:
    """Return the copy of the model folder `source` below `cache`, which is made if it is not there, with
    `threads` files at a time; blocks until it is complete. Without room for it, or if it is damaged while
    another worker uses it, return `source`. The copy is kept while this process runs.

    Raises ConfigError if `cache` cannot be written, OSError if `source` cannot be read.
    """
    items = _items(source)
    name = f"{source.name[:60]}-{_digest(source, items)}"
    try:
        folders = SharedFolders(cache)
        probe = cache / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"model.load.node_cache: {cache} cannot be written: {error.strerror}; mount a volume of the node "
            "there, or remove the field"
        ) from error

    def make(draft: Path) -> None:
        _make_room(folders, cache, sum(item.size for item in items))
        _copy(source, draft, items, threads)

    def waiting() -> None:
        log.info("waiting for another worker of this node, which copies %s to %s", source, cache)

    try:
        return folders.hold(name, make, whole=lambda copy: _is_whole(copy, items), waiting=waiting)
    except _NoRoomError as error:
        why = str(error)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        why = str(error.strerror)
    log.warning("%s is read where it is: %s", source, why)
    return source


class _NoRoomError(Exception):
    """The copy does not fit."""


def _items(source: Path) -> list[_Item]:
    found = []
    for parent, folders, names in os.walk(source, followlinks=True):
        folders[:] = [each for each in folders if each[0] != "." and each not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(parent, name)
            if name[0] != "." and path.is_file():
                status = path.stat()
                found.append(_Item(path.relative_to(source), status.st_size, status.st_mtime_ns))
    if any(item.path.suffix == ".safetensors" for item in found):
        found = [item for item in found if item.path.suffix not in _OTHER_WEIGHTS]
    return sorted(found, key=lambda item: (-item.size, item.path))


def _digest(source: Path, items: Sequence[_Item]) -> str:
    """Return what changes with the files. Their content is not read: that is what a copy is to avoid."""
    digest = hashlib.sha256(str(source.resolve()).encode())
    for item in items:
        digest.update(f"\0{item.path}\0{item.size}\0{item.changed_ns}".encode())
    return digest.hexdigest()[:16]


def _is_whole(copy: Path, items: Sequence[_Item]) -> bool:
    try:
        return all((copy / item.path).stat().st_size == item.size for item in items)
    except OSError:
        return False


def _make_room(folders: SharedFolders, cache: Path, needed: int) -> None:
    """Remove unused copies until `needed` bytes fit. Raises _NoRoomError if they do not."""
    unused = iter(folders.least_recent())
    while True:
        usage = shutil.disk_usage(cache)
        room = usage.free - int(_KEPT_FREE * usage.total)
        if needed <= room:
            return
        for name in unused:
            if folders.remove(name):
                log.info("removed the copy %s from %s, to make room", name, cache)
                break
        else:
            raise _NoRoomError(
                f"its copy needs {size_text(needed)}, and {cache} has room for {size_text(max(0, room))}"
            )


def _copy(source: Path, draft: Path, items: Sequence[_Item], threads: int) -> None:
    total = sum(item.size for item in items)
    log.info("copying %s (%s) to %s", source, size_text(total), draft.parent)
    progress = _Progress(source, total)
    for item in items:
        (draft / item.path).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(threads, thread_name_prefix="node-copy") as pool:
        copies = [pool.submit(_copy_file, source / item.path, draft / item.path, progress) for item in items]
        try:
            for each in copies:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not _is_whole(draft, items):
        raise OSError(f"{source} changed while it was copied")


def _copy_file(source: Path, target: Path, progress: _Progress) -> None:
    piece = memoryview(bytearray(_PIECE_BYTES))
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while count := reader.readinto(piece):
            written = 0
            while written < count:
                written += writer.write(piece[written:count])
            progress.add(count)
        # A copy of the right size would be taken for whole after a power failure.
        os.fsync(writer.fileno())


class _Progress:
    """Logs each tenth of a copy."""

    def __init__(self, source: Path, total: int) -> None:
        self._source = source
        self._total = total
        self._done = 0
        self._tenths = 0
        self._lock = Lock()

    def add(self, count: int) -> None:
        """Count more bytes."""
        with self._lock:
            self._done += count
            tenths = 10 * self._done // self._total
            if tenths == self._tenths:
                return
            self._tenths = tenths
            done = self._done
        log.info("copied %d %% of %s (%s)", 10 * tenths, self._source, size_text(done))
