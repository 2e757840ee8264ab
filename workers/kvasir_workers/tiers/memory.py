"""Host memory that one engine's processes share: the bytes behind the arena.

With tensor parallelism every rank is a process of its own, and fills its part of each slot. The memory has no
name in any file system: whoever makes it tells the others which descriptor of which process it is, and the
kernel frees it with the last of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

from kvasir.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SharedName:
    """How another process of the same user opens the memory: `path` is valid while its maker lives."""

    path: str
    slots: int
    slot_bytes: int


class SharedMemory:
    """`slots` slots of `slot_bytes` bytes each, mapped into this process until the last view of it is gone.

    Pages are taken from the system when they are first written.
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self._fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        try:
            self._map = mmap.mmap(fd, slots * slot_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"tiers.cpu.bytes: {slots * slot_bytes} B cannot be mapped: {error}") from error
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> SharedMemory:
        """New memory. Raises ConfigError when the system has none to give."""
        fd = os.memfd_create("kvasir-tiers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, slots * slot_bytes)
            # A process that made it shorter would kill the others at their next access.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"tiers.cpu.bytes: {slots * slot_bytes} B cannot be had: {error}") from error
        return cls(fd, slots, slot_bytes)

    @classmethod
    def open(cls, name: SharedName) -> SharedMemory:
        """Another process's memory. Raises OSError when that process is gone."""
        return cls(os.open(name.path, os.O_RDWR | os.O_CLOEXEC), name.slots, name.slot_bytes)

    @property
    def name(self) -> SharedName:
        """What `open` wants elsewhere."""
        return SharedName(f"/proc/{os.getpid()}/fd/{self._fd}", self.slots, self.slot_bytes)

    def slot_view(self, slot: int) -> memoryview:
        """One slot's bytes, writable."""
        return self.view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def close(self) -> None:
        """Let go of the descriptor; views stay valid. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
