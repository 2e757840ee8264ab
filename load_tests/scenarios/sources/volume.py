"""A network volume: a folder that is mounted through FUSE, behind a slow link.

The page cache of a FUSE mount belongs to the mount, as that of a volume that is mounted for each pod, so that
what processes read through mounts of their own comes from the source each time. Linux describes the protocol
in include/uapi/linux/fuse.h; this is the part of it that reading a flat folder takes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

from load_tests.scenarios.sources.link import SlowLink

_DEVICE = "/dev/fuse"
_THREADS = 8
_END_S = 10.0
_REQUEST_BYTES = 64 << 10
_MAJOR, _MINOR = 7, 31
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_BACKGROUND, _PAGES = 16, 256
_KEEP_CACHE = 1 << 1
_VALID_S = 3600
_BLOCK = 4096
_ROOT = 1
_CAP_SYS_ADMIN = 21
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MNT_DETACH = 1, 2, 4, 2

_REQUEST = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_INIT = struct.Struct("<IIII")
_INITIATED = struct.Struct("<IIIIHHIIHHI7I")
_READ = struct.Struct("<QQI")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_VALIDITY = struct.Struct("<QII")
_OPENED = struct.Struct("<QIi")
_STATISTICS = struct.Struct("<5Q4I24x")
_LISTED = struct.Struct("<QQII")

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ_FILE, _STATFS = 1, 2, 3, 14, 15, 17
_RELEASE, _FLUSH, _INIT_MOUNT, _OPENDIR, _READDIR, _RELEASEDIR = 18, 25, 26, 27, 28, 29
_INTERRUPT, _BATCH_FORGET = 36, 42
_UNANSWERED = {_FORGET, _INTERRUPT, _BATCH_FORGET}


def may_mount() -> bool:
    """Whether this process may mount volumes: it has root's capability to, and may use FUSE's device."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return bool(effective >> _CAP_SYS_ADMIN & 1)


class SlowVolume:
    """The files of `folder`, without folders in it, mounted read-only at `place`, which is created. Raise
    OSError if it cannot be mounted."""

    def __init__(self, folder: Path, place: Path, link: SlowLink) -> None:
        self._files = {
            number: path for number, path in enumerate(sorted(folder.iterdir()), _ROOT + 1) if path.is_file()
        }
        self._numbers = {path.name: number for number, path in self._files.items()}
        self._folder = folder
        self._place = place
        self._link = link
        self._handles: dict[int, int] = {}
        self._device = -1
        self._threads: list[Thread] = []
        self._answers: Mapping[int, Callable[[int, bytes], bytes]] = {
            _INIT_MOUNT: self._init,
            _LOOKUP: self._look_up,
            _GETATTR: lambda node, _: _VALIDITY.pack(_VALID_S, 0, 0) + self._attributes(node),
            _OPEN: lambda node, _: _OPENED.pack(node, _KEEP_CACHE, 0),
            _OPENDIR: lambda node, _: _OPENED.pack(node, 0, 0),
            _READ_FILE: self._read,
            _READDIR: self._list,
            _STATFS: lambda node, _: _STATISTICS.pack(0, 0, 0, len(self._files), 0, _BLOCK, 255, _BLOCK, 0),
            _FLUSH: lambda node, _: b"",
            _RELEASE: lambda node, _: b"",
            _RELEASEDIR: lambda node, _: b"",
        }

    def __enter__(self) -> Self:
        self._place.mkdir(parents=True, exist_ok=True)
        self._device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"kvasir", os.fsencode(self._place), b"fuse", flags, options.encode()):
            os.close(self._device)
            raise OSError(ctypes.get_errno(), f"{self._place} cannot be mounted")
        self._handles = {number: os.open(path, os.O_RDONLY) for number, path in self._files.items()}
        self._threads = [Thread(target=self._serve, name="volume", daemon=True) for _ in range(_THREADS)]
        for each in self._threads:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ctypes.CDLL(None).umount2(os.fsencode(self._place), _MNT_DETACH)
        for each in self._threads:
            each.join(_END_S)
        for descriptor in (*self._handles.values(), self._device):
            os.close(descriptor)

    def _serve(self) -> None:
        """Answer requests until the volume is unmounted."""
        while True:
            try:
                request = os.read(self._device, _REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # the request was interrupted
                    continue
                return
            _, kind, unique, node, *_ = _REQUEST.unpack_from(request)
            if kind in _UNANSWERED:
                continue
            code, body = 0, b""
            try:
                body = self._answers[kind](node, request[_REQUEST.size :])
            except KeyError:
                code = -errno.ENOSYS
            except OSError as error:
                code = -(error.errno or errno.EIO)
            try:
                os.write(self._device, _ANSWER.pack(_ANSWER.size + len(body), code, unique) + body)
            except OSError as error:
                if error.errno != errno.ENOENT:  # who asked has ended
                    return

    def _init(self, node: int, body: bytes) -> bytes:
        _, _, ahead, offered = _INIT.unpack_from(body)
        flags = offered & (_ASYNC_READ | _MAX_PAGES)
        sizes = (_BACKGROUND, _BACKGROUND * 3 // 4, _BLOCK, 1, _PAGES, 0, 0)
        return _INITIATED.pack(_MAJOR, _MINOR, ahead, flags, *sizes, *[0] * 7)

    def _look_up(self, node: int, body: bytes) -> bytes:
        name = os.fsdecode(body.rstrip(b"\0"))
        if name not in self._numbers:
            raise FileNotFoundError(errno.ENOENT, name)
        number = self._numbers[name]
        return _ENTRY.pack(number, 0, _VALID_S, _VALID_S, 0, 0) + self._attributes(number)

    def _attributes(self, node: int) -> bytes:
        found = (self._folder if node == _ROOT else self._files[node]).stat()
        kind = stat.S_IFDIR | 0o555 if node == _ROOT else stat.S_IFREG | 0o444
        times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
        parts = tuple(at % 10**9 for at in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns))
        links, owner = 1, (0, 0)
        size = found.st_size
        return _ATTRIBUTES.pack(
            node, size, -(-size // 512), *times, *parts, kind, links, *owner, 0, _BLOCK, 0
        )

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, count = _READ.unpack_from(body)
        found = os.pread(self._handles[node], count, offset)
        self._link.carry(len(found))
        return found

    def _list(self, node: int, body: bytes) -> bytes:
        _, offset, room = _READ.unpack_from(body)
        listed = b""
        for place, (name, number) in enumerate(self._numbers.items(), 1):
            text = os.fsencode(name)
            entry = _LISTED.pack(number, place, len(text), stat.S_IFREG >> 12) + text
            entry += bytes(-len(entry) % 8)
            if place > offset and len(listed) + len(entry) <= room:
                listed += entry
            elif place > offset:
                break
        return listed
