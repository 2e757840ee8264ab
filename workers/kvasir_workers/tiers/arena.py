"""Allocation of host memory slots to blocks, and eviction.

Blocks of every tier pass through the arena: the engine copies into it and out of it, and the lower tiers are
written from it and read into it. This module only tracks slots; other modules hold the bytes and the threads.

    free --reserve--> filling --commit--> ready --evicted--> free
                         '-----abandon----> free

A block is found once it is ready. A pin prevents the eviction of a ready block; every reader holds one while
it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

from kvasir.ports.tier import TierBlock, TierChange
from kvasir_workers.tiers.eviction import Eviction


class _State(IntEnum):
    FREE = 0
    FILLING = 1
    READY = 2


class Arena:
    """`slots` slots, numbered from 0. `policy` selects the ready block to evict; the arena owns it.

    All calls are O(1), amortized, and must come from one thread. A call that a slot's state does not allow
    raises ValueError, and changes nothing.
    """

    def __init__(self, slots: int, policy: Eviction[bytes]) -> None:
        if slots < 1:
            raise ValueError(f"an arena of {slots} slots; at least 1")
        self._policy = policy
        self._states = [_State.FREE] * slots
        self._blocks: list[TierBlock | None] = [None] * slots
        self._pins = [0] * slots
        # Slots are allocated in order: copies merge neighbouring slots.
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._ready = 0
        self._idle = 0  # ready and not pinned
        self._evicted = 0
        self._stored: dict[bytes, TierBlock] = {}
        self._removed: dict[bytes, TierBlock] = {}

    # -- lookup ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(self._states)

    @property
    def ready(self) -> int:
        """Number of ready blocks."""
        return self._ready

    @property
    def evicted(self) -> int:
        """Number of blocks evicted so far."""
        return self._evicted

    def find(self, key: bytes) -> int | None:
        """Return the slot of a ready block, or None."""
        slot = self._slots.get(key)
        return slot if slot is not None and self._states[slot] is _State.READY else None

    def holds(self, key: bytes) -> bool:
        """Return whether the block is ready or being filled."""
        return key in self._slots

    def block(self, slot: int) -> TierBlock:
        """Return the block that a filling or ready slot is for."""
        block = self._blocks[slot]
        if block is None:
            raise ValueError(f"slot {slot} is free")
        return block

    def blocks(self) -> Iterator[TierBlock]:
        """Return every ready block, in slot order. The arena must not change meanwhile."""
        for state, block in zip(self._states, self._blocks, strict=True):
            if state is _State.READY and block is not None:
                yield block

    # -- allocation and eviction -------------------------------------------------------------------

    def reserve(self, block: TierBlock) -> int | None:
        """Allocate a slot for a block that is not held, evicting another if necessary. None while every slot
        is pinned or filling. The slot stays the caller's until `commit` or `abandon`."""
        if block.key in self._slots:
            raise ValueError(f"block {block.key.hex()} is held already")
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        self._states[slot] = _State.FILLING
        self._blocks[slot] = block
        self._slots[block.key] = slot
        return slot

    def commit(self, slot: int) -> None:
        """Mark the slot's block as ready."""
        self._must_be(slot, _State.FILLING)
        block = self.block(slot)
        self._states[slot] = _State.READY
        self._ready += 1
        self._idle += 1
        self._policy.insert(block.key)
        if self._removed.pop(block.key, None) is None:
            self._stored[block.key] = block

    def abandon(self, slot: int) -> None:
        """Free a slot that will not be filled. Nothing may write to it after this."""
        self._must_be(slot, _State.FILLING)
        del self._slots[self.block(slot).key]
        self._release(slot)

    def pin(self, slot: int) -> None:
        """Keep a ready block in its slot. Pins are counted."""
        self._must_be(slot, _State.READY)
        if not self._pins[slot]:
            self._idle -= 1
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Remove one pin."""
        if not self._pins[slot]:
            raise ValueError(f"slot {slot} is not pinned")
        self._pins[slot] -= 1
        if not self._pins[slot]:
            self._idle += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a request used these blocks, given in the order of its prompt. Call it once per
        request, since policies count uses, and include blocks that it found on the device. Blocks that are
        not ready are ignored."""
        for key in reversed(keys):
            self._policy.touch(key)

    def take_changes(self) -> TierChange:
        """Return the difference of the ready blocks to those at the last call: at most `capacity` blocks
        added and removed, however many changed in between."""
        change = TierChange(tuple(self._stored.values()), tuple(self._removed.values()))
        self._stored.clear()
        self._removed.clear()
        return change

    def _evict(self) -> bool:
        if not self._idle:
            return False
        key = self._policy.victim(self._is_pinned)
        if key is None:
            return False
        slot = self._slots.pop(key)
        block = self.block(slot)
        self._ready -= 1
        self._idle -= 1
        self._evicted += 1
        if self._stored.pop(key, None) is None:
            self._removed[key] = block
        self._release(slot)
        return True

    def _is_pinned(self, key: bytes) -> bool:
        return self._pins[self._slots[key]] > 0

    def _release(self, slot: int) -> None:
        self._states[slot] = _State.FREE
        self._blocks[slot] = None
        self._free.append(slot)

    def _must_be(self, slot: int, state: _State) -> None:
        if self._states[slot] is not state:
            found = self._states[slot].name.lower()
            raise ValueError(f"slot {slot} is {found}, not {state.name.lower()}")
