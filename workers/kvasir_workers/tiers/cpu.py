"""The tier in host memory: an arena's slots, and the bytes in them.

It is the fastest tier below the device, and where the others read to and are written from; what it holds is
gone with the process. The memory is given to it, since who else maps it decides of what kind it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.tier import Block, Change, Read, Write
from kvasir_workers.tiers.arena import Arena


class CpuTier:
    """`kvasir.ports.tier.KvTier` over `arena`, whose slot i has the `block_bytes` bytes of `memory` from
    i * block_bytes on. The tier alone takes the arena's changes. `now` is a monotonic clock in seconds.

    Raises ValueError where the memory is too small or not to be written to.
    """

    def __init__(self, arena: Arena, memory: memoryview, block_bytes: int, now: Callable[[], float]) -> None:
        if block_bytes < 1:
            raise ValueError(f"blocks of {block_bytes} bytes")
        if memory.readonly or memory.nbytes < arena.capacity * block_bytes:
            raise ValueError(
                f"{arena.capacity} slots of {block_bytes} bytes need as much writable memory, not "
                f"{memory.nbytes} {'read-only ' if memory.readonly else ''}bytes"
            )
        self._arena = arena
        self._memory = memory.cast("B")
        self._block_bytes = block_bytes
        self._now = now
        self._closed = False
        self._loads = self._loaded = self._stored = self._dropped = self._failures = 0
        self._load_s = 0.0

    @property
    def medium(self) -> Medium:
        """See KvTier."""
        return Medium.CPU

    def slot_view(self, slot: int) -> memoryview:
        """The slot's bytes, writable. To be released before the memory can be unmapped. Raises ValueError
        after `close`."""
        begin = slot * self._block_bytes
        return self._memory[begin : begin + self._block_bytes]

    def lookup(self, keys: Sequence[bytes]) -> int:
        """See KvTier."""
        for depth, key in enumerate(keys):
            if self._closed or self._arena.find(key) is None:
                return depth
        return len(keys)

    def get(self, wanted: Sequence[Read]) -> int:
        """See KvTier."""
        began = self._now()
        found: list[bytes] = []
        for key, target in wanted:
            slot = self._arena.find(key)
            if slot is None or self._closed:
                break
            if target.readonly or not self._fits(target):
                self._failures += 1
                break
            with self.slot_view(slot) as source, target.cast("B") as place:
                place[:] = source
            found.append(key)
        if found:
            self._arena.touch(found)
            self._loads += 1
            self._loaded += len(found)
            self._load_s += self._now() - began
        return len(found)

    def put(self, blocks: Sequence[Write]) -> Change:
        """See KvTier."""
        again: list[bytes] = []
        for block, data in blocks:
            if self._arena.find(block.key) is not None:
                again.append(block.key)
            elif self._closed or not self._fits(data):
                self._failures += 1
            elif not self._arena.holds(block.key):
                self._store(block, data)
        self._arena.touch(again)
        return self._arena.take_changes()

    def drop(self, keys: Sequence[bytes]) -> Change:
        """See KvTier."""
        for key in keys:
            self._arena.drop(key)
        return self._arena.take_changes()

    def tend(self) -> Change:
        """See KvTier."""
        return self._arena.take_changes()

    def held(self) -> Iterable[Block]:
        """See KvTier."""
        return tuple(self._arena.blocks())

    def load(self) -> TierLoad:
        """See KvTier."""
        size = self._block_bytes
        return TierLoad(
            Medium.CPU,
            blocks=self._arena.ready,
            bytes_used=self._arena.ready * size,
            bytes_capacity=self._arena.capacity * size,
            loads=self._loads,
            loaded_blocks=self._loaded,
            loaded_bytes=self._loaded * size,
            load_s=self._load_s,
            stored_blocks=self._stored,
            stored_bytes=self._stored * size,
            evicted_blocks=self._arena.evicted,
            dropped_blocks=self._dropped,
            failures=self._failures,
        )

    def close(self) -> None:
        """See KvTier. Holds the memory no longer; views of slots keep it until they are released."""
        if self._closed:
            return
        self._closed = True
        for block in self.held():
            self._arena.drop(block.key)
        self._memory.release()

    def _fits(self, data: memoryview) -> bool:
        return data.nbytes == self._block_bytes and data.c_contiguous

    def _store(self, block: Block, data: memoryview) -> None:
        slot = self._arena.reserve(block)
        if slot is None:
            self._dropped += 1
            return
        with self.slot_view(slot) as place, data.cast("B") as source:
            place[:] = source
        self._arena.commit(slot)
        self._stored += 1
