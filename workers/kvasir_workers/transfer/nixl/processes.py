"""Reads from another process of the same machine, which the kernel makes (process_vm_readv).

UCX moves host memory within a machine by the same call, but on one thread, and a checksum then reads the
bytes from memory again. Here threads without the GIL read in turn and sum what they read while it is in the
CPU's cache. NIXL connects the agents and carries their notices, and reads itself where the kernel refuses:
from another PID namespace or user, and memory of GPUs.

What is read is verified as with any other read: a process that got the number of one that ended has no such
lease.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvasir.native import ProcessRead, ProcessReader
from kvasir.ports.transfer import BlockPart, KvRegion
from kvasir_workers.transfer.common.checksums import INLINE_BYTES, Sums
from kvasir_workers.transfer.nixl.agent import Descriptors, XferState

THREADS = 2
_BOOT = "/proc/sys/kernel/random/boot_id"
_NAMESPACE = "/proc/self/ns/pid"
_PROBE_BYTES = 8

Words = npt.NDArray[np.uint64]


class ProcessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process. `machine` is the boot and the PID namespace in which it has the number `pid`."""

    machine: str
    pid: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]


def this_process() -> ProcessId | None:
    """Return this process; None if the machine does not tell it from those of other machines."""
    try:
        with open(_BOOT, encoding="ascii") as boot:
            return ProcessId(f"{boot.read().strip()}/{os.stat(_NAMESPACE).st_ino}", os.getpid())
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Blocks:
    """`part` of the blocks `ids` of one process's `regions`."""

    regions: Sequence[KvRegion]
    ids: Sequence[int]
    part: BlockPart

    def addresses(self) -> Words:
        """Return the address of each block in the first region, then in the second, and so on."""
        bases = np.array([region.address for region in self.regions], dtype=np.uint64)
        strides = np.array([region.block_bytes for region in self.regions], dtype=np.uint64)
        starts = bases + strides // np.uint64(self.part.of) * np.uint64(self.part.index)
        ids = np.asarray(self.ids, dtype=np.uint64)
        found: Words = (starts[:, None] + strides[:, None] * ids[None, :]).ravel()
        return found

    def lengths(self) -> Words:
        """Return their lengths in bytes, in the same order."""
        sizes = [region.block_bytes // self.part.of for region in self.regions]
        return np.repeat(np.array(sizes, dtype=np.uint64), len(self.ids))


class KernelRead:
    """One read of `rows` blocks, with `parts` checksums each."""

    def __init__(self, read: ProcessRead, rows: int, parts: int) -> None:
        self._read = read
        self._shape = (rows, parts)

    @property
    def state(self) -> XferState:
        """Its state. After DONE and FAILED nothing more is written."""
        code = self._read.state()
        if code < 0:
            return XferState.RUNNING
        return XferState.FAILED if code else XferState.DONE

    def cancel(self) -> None:
        """End it soon, as failed, unless it is done."""
        self._read.cancel()

    def sums(self) -> Sums:
        """Return the checksums of the received blocks, once it is done."""
        return np.frombuffer(self._read.sums(), dtype=np.uint64).reshape(self._shape)


class ProcessReads:
    """Reads from other processes of the machine of `mine`, which is this process."""

    def __init__(self, mine: ProcessId) -> None:
        self._mine = mine
        self._reader = ProcessReader(THREADS)

    def reaches(self, process: ProcessId | None, address: int) -> bool:
        """Return whether the kernel lets this process read that one, which has memory at `address`."""
        if process is None or process.machine != self._mine.machine or not 0 < address < 1 << 63:
            return False
        probe = np.zeros(_PROBE_BYTES, dtype=np.uint8)
        local = np.array([[probe.ctypes.data, _PROBE_BYTES, 0]], dtype=np.uint64)
        remote = np.array([[address, _PROBE_BYTES, 0]], dtype=np.uint64)
        return self.read(process, local, remote).state is XferState.DONE

    def read(self, process: ProcessId, local: Descriptors, remote: Descriptors) -> KernelRead:
        """Copy `remote` into `local`, pairwise, and return the finished read."""
        lengths = np.ascontiguousarray(local[:, 1])
        sources, targets = np.ascontiguousarray(remote[:, 0]), np.ascontiguousarray(local[:, 0])
        read = self._reader.begin(
            process.pid, sources.data, targets.data, lengths.data, len(lengths), 0, int(lengths.sum())
        )
        return KernelRead(read, len(lengths), 0)

    def begin(self, process: ProcessId, theirs: Blocks, mine: Blocks, parts: int) -> KernelRead:
        """Start to read blocks of the other process into as many of this one, and to sum each in `parts`. Up
        to INLINE_BYTES are read in the call."""
        sources, targets, lengths = theirs.addresses(), mine.addresses(), mine.lengths()
        rows = len(mine.ids)
        read = self._reader.begin(
            process.pid, sources.data, targets.data, lengths.data, rows, parts, INLINE_BYTES
        )
        return KernelRead(read, rows, parts)

    def close(self) -> None:
        """Return when nothing is read any more. Idempotent."""
        self._reader.close()
