"""Host memory shared by one engine's processes: the bytes of the arena.

With tensor or pipeline parallelism every rank is a separate process, and fills its part of each slot. The
memory has no name in any file system: its creator passes its process id and file descriptor to the others,
and the kernel frees the memory with the last of them. Ranks on several nodes have memory of their own each.
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
    """How another process of the same user opens the memory: `path` is valid while its creator lives."""

    path: str
    slots: int
    slot_bytes: int


class SharedMemory:
    """`slots` slots of `slot_bytes` bytes each, mapped into this process until the last view of it is gone.

    Pages are allocated when they are first written.
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
        """Create memory. Raise ConfigError if the system has not enough."""
        fd = os.memfd_create("kvasir-tiers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, slots * slot_bytes)
            # A process that truncated it would kill the others at their next access.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"tiers.cpu.bytes: {slots * slot_bytes} B cannot be allocated: {error}"
            ) from error
        return cls(fd, slots, slot_bytes)

    @classmethod
    def open(cls, name: SharedName) -> SharedMemory:
        """Open another process's memory. Raise OSError if that process has ended."""
        return cls(os.open(name.path, os.O_RDWR | os.O_CLOEXEC), name.slots, name.slot_bytes)

    @property
    def name(self) -> SharedName:
        """Return what `open` needs in another process."""
        return SharedName(f"/proc/{os.getpid()}/fd/{self._fd}", self.slots, self.slot_bytes)

    def slot_view(self, slot: int) -> memoryview:
        """Return one slot's bytes, writable."""
        return self.view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def close(self) -> None:
        """Close the descriptor; views stay valid. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
