"""The disk tier: blocks as files that outlive the worker, bounded, and verified when read.

A block's file is named by its key, so a lookup needs only an index in memory. After a start the index is
filled from the folder in small steps; until then a block that is not in it is a miss, and nothing is written.
A disk that is full or read-only is still read; a disk that fails or hangs is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from errno import EACCES, EDQUOT, EIO, ENOENT, ENOSPC, EPERM, EROFS

from kvasir.config.spec.tiers import DiskTierSpec
from kvasir.core.kv import Medium
from kvasir.ports.clock import Rng
from kvasir.ports.tier import TierChange, TierRead, TierWrite
from kvasir_workers.tiers.blob import HEADER_BYTES, read_header, verify_payload
from kvasir_workers.tiers.blobs.blob_tier import BlobTier
from kvasir_workers.tiers.blobs.disk_folder import FANS, BlobFolder
from kvasir_workers.tiers.breaker import BreakerLimits
from kvasir_workers.tiers.eviction import Eviction, EvictionKind, eviction
from kvasir_workers.tiers.health import TierHealth

_PAGE_BYTES = 4096
_INODE_BYTES = 512
_TEND_S = 0.02
_EVICTION: EvictionKind = "lfu"
_REMEDIES = {
    ENOSPC: "free space there, or lower tiers.disk.bytes",
    EDQUOT: "raise the quota, or lower tiers.disk.bytes",
    EROFS: "mount it writable",
    EACCES: "give access to the worker's user only",
    EPERM: "give access to the worker's user only",
    ENOENT: "mount or create it",
    EIO: "check the kernel's log; replace the disk",
}


class DiskTier(BlobTier):
    """See `kvasir.ports.tier.KvTier` and BlobTier."""

    def __init__(
        self,
        spec: DiskTierSpec,
        fingerprint: bytes,
        block_bytes: int,
        *,
        now: Callable[[], float] = time.monotonic,
        rng: Rng | None = None,
        limits: BreakerLimits | None = None,
    ) -> None:
        footprint = -(-(HEADER_BYTES + block_bytes + _INODE_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self._capacity = spec.bytes // footprint
        super().__init__(
            Medium.DISK,
            f"the disk tier at {spec.path}",
            fingerprint,
            block_bytes,
            footprint=footprint,
            capacity=spec.bytes,
            most_blocks=self._capacity,
            now=now,
            rng=rng,
            limits=limits,
        )
        self._spec = spec
        self._folder: BlobFolder | None = None
        self._order: Eviction[bytes] = eviction(_EVICTION, max(1, self._capacity))
        self._chores: Iterator[None] | None = None
        self._open()
        self._try_writing()

    def lookup(self, keys: Sequence[bytes]) -> int:
        """See KvTier. Does no I/O."""
        if self._folder is None or not self._reads.usable:
            return 0
        return next((at for at, key in enumerate(keys) if key not in self._held), len(keys))

    def get(self, wanted: Sequence[TierRead]) -> int:
        """See KvTier."""
        began = self._now()
        loaded = 0
        try:
            for read in wanted[: self.lookup([read.key for read in wanted])]:
                if not self._read(read, began + self._spec.timeout_s):
                    break
                loaded += 1
        except OSError as error:
            # A read that returned nothing within its timeout is not retried.
            self._failed(self._reads, error, at_once=not loaded and isinstance(error, TimeoutError))
        else:
            if loaded:
                self._reads.succeeded()
        for read in reversed(wanted[:loaded]):
            self._order.touch(read.key)
        if loaded:
            self._tally.loaded(loaded, self._now() - began)
        return loaded

    def put(self, blocks: Sequence[TierWrite]) -> TierChange:
        """See KvTier."""
        deadline = self._now() + self._spec.timeout_s
        used: list[bytes] = []
        if self._writes.usable and self._settled():
            try:
                for write in blocks:
                    if self._now() > deadline or not self._keep(write):
                        break
                    used.append(write.block.key)
            except OSError as error:
                self._failed(self._writes, error, at_once=True)
        for key in reversed(used):
            self._order.insert(key)
        self._count_dropped(blocks)
        return self._held.take()

    def drop(self, keys: Sequence[bytes]) -> TierChange:
        """See KvTier."""
        for key in keys:
            self._forget(key)
        return self._held.take()

    def maintain(self) -> TierChange:
        """See KvTier."""
        if not self._closed:
            if self._reads.due():
                self._open()
            if self._reads.usable and self._writes.due():
                self._try_writing()
            self._settled()
        return self._held.take()

    @property
    def maintenance_pending(self) -> bool:
        """See KvTier."""
        return not self._closed and self._reads.usable and self._chores is not None

    def close(self) -> None:
        """See KvTier."""
        self._closed = True
        self._leave()

    # -- the folder --------------------------------------------------------------------------------

    def _open(self) -> None:
        """Claim the folder, unless the one that is locked is still there."""
        try:
            if self._folder is None or not self._folder.alive():
                self._leave()
                self._folder = BlobFolder.claim(self._spec.path, self._fingerprint)
                self._chores = self._begin(self._folder)
        except OSError as error:
            self._failed(self._reads, error, at_once=True)
        else:
            self._reads.succeeded()

    def _leave(self) -> None:
        if self._folder is not None:
            self._folder.close()
        self._folder = None
        self._chores = None
        self._held.clear()
        self._order = eviction(_EVICTION, max(1, self._capacity))

    def _try_writing(self) -> None:
        if self._folder is None:
            return
        if not self._capacity:
            self._writes.failed(
                f"one block takes {self._footprint} bytes there: raise tiers.disk.bytes", at_once=True
            )
            return
        try:
            self._folder.try_room(self._footprint)
        except OSError as error:
            self._failed(self._writes, error, at_once=True)
        else:
            self._writes.succeeded()

    def _failed(self, health: TierHealth, error: OSError, *, at_once: bool) -> None:
        self._tally.add(failures=1)
        if self._folder is not None and not self._folder.alive():
            health, at_once = self._reads, True
        if isinstance(error, TimeoutError):
            trouble = (
                f"a read took longer than {self._spec.timeout_s:g} s: use a faster disk, or raise timeout_s"
            )
        else:
            remedy = _REMEDIES.get(error.errno or 0, "check the disk")
            trouble = f"{error.strerror or error} ({error.filename or self._spec.path}): {remedy}"
        health.failed(trouble, at_once=at_once)

    def _settled(self) -> bool:
        """Run pending work before the first write for a limited time. Return whether all of it is done."""
        until = self._now() + _TEND_S
        folder = self._folder
        try:
            while folder is not None and self._reads.usable and self._chores is not None:
                if next(self._chores, self) is self:
                    self._chores = None
                elif self._now() > until:
                    break
        except OSError as error:
            self._chores = self._begin(folder) if folder is not None else None
            self._failed(self._reads, error, at_once=True)
        return folder is not None and self._reads.usable and self._chores is None

    def _begin(self, folder: BlobFolder) -> Iterator[None]:
        """Delete foreign blobs and index the existing ones, in small steps."""
        yield from folder.purge()
        for fan in range(FANS):
            for key in folder.keys(fan):
                self._find(folder, key)
                yield

    # -- blocks ------------------------------------------------------------------------------------

    def _find(self, folder: BlobFolder, key: bytes) -> None:
        try:
            header, size = folder.read_header(key)
        except OSError:
            # One bad file must not prevent the others from being found.
            self._tally.add(failures=1)
            self._forget(key)
            return
        reason = self._judge(key, header, size)
        if reason is not None:
            self._discard(key, reason)
        elif self._make_room():
            self._held.add(read_header(header).block)
            self._order.insert(key)

    def _read(self, read: TierRead, deadline: float) -> bool:
        folder = self._folder

        def check() -> None:
            if self._now() > deadline:
                raise TimeoutError

        if folder is None:
            return False
        try:
            header, size = folder.read(read.key, read.target, check)
        except TimeoutError:
            raise
        except OSError as error:
            alive = folder.alive()
            self._forget(read.key)
            if alive and isinstance(error, FileNotFoundError):
                return False
            raise
        reason = self._judge(read.key, header, size)
        reason = reason or verify_payload(read_header(header), read.target)
        if reason is not None:
            self._discard(read.key, reason)
        return reason is None

    def _keep(self, write: TierWrite) -> bool:
        """Store a block and return whether it is there. Blocks of the same call do not evict each other."""
        if write.block.key in self._held:
            return True
        if self._folder is None or not self._make_room():
            return False
        self._folder.write(write.block.key, self._header(write), write.data)
        self._held.add(write.block)
        self._tally.stored(1)
        return True

    def _make_room(self) -> bool:
        while len(self._held) >= self._capacity:
            victim = self._order.victim()
            if victim is None:
                return False
            self._delete(victim)
            self._tally.add(evicted_blocks=1)
        return True

    def _discard(self, key: bytes, reason: str) -> None:
        if self._folder is not None:
            self._refuse(reason, f"{self._folder.path}/{key.hex()}")
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._delete(key)
        self._order.remove(key)

    def _delete(self, key: bytes) -> None:
        """The policy may remember the key: a block that returns after its eviction was worth keeping."""
        if self._folder is not None:
            self._folder.delete(key)
        self._held.remove(key)
