"""Which block is in which slot of host memory, and which may give way to another.

The arena is where every tier's blocks pass through: the engine copies into it and out of it, and the lower
tiers are written from it and read into it. All that is decided here is who holds a slot; the bytes are
elsewhere, and so are the threads.

    free --reserve--> filling --commit--> ready --evicted--> free
                         '-----abandon----> free

A block is found once it is ready. A pin keeps a ready block's slot from being given to another: whoever
reads it holds one for as long as it reads.
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
    """`slots` places, numbered from 0. `policy` says which ready block gives way; it belongs to the arena.

    All calls are O(1), amortised, and from one thread. A slot in a state that a call does not allow is a
    ValueError, and nothing changes.
    """

    def __init__(self, slots: int, policy: Eviction[bytes]) -> None:
        if slots < 1:
            raise ValueError(f"an arena of {slots} slots; at least 1")
        self._policy = policy
        self._states = [_State.FREE] * slots
        self._blocks: list[TierBlock | None] = [None] * slots
        self._pins = [0] * slots
        # Neighbours are handed out one after the other: copies merge what lies side by side.
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._ready = 0
        self._idle = 0  # ready and not pinned
        self._evicted = 0
        self._stored: dict[bytes, TierBlock] = {}
        self._removed: dict[bytes, TierBlock] = {}

    # -- what is there -----------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return len(self._states)

    @property
    def ready(self) -> int:
        """Blocks that can be found."""
        return self._ready

    @property
    def evicted(self) -> int:
        """Blocks that gave way to others so far."""
        return self._evicted

    def find(self, key: bytes) -> int | None:
        """The slot of a ready block."""
        slot = self._slots.get(key)
        return slot if slot is not None and self._states[slot] is _State.READY else None

    def holds(self, key: bytes) -> bool:
        """Whether the block is ready or on its way."""
        return key in self._slots

    def block(self, slot: int) -> TierBlock:
        """Which block the slot is for: filling or ready."""
        block = self._blocks[slot]
        if block is None:
            raise ValueError(f"slot {slot} is free")
        return block

    def blocks(self) -> Iterator[TierBlock]:
        """Every ready block, in the order of slots. Nothing may change meanwhile."""
        for state, block in zip(self._states, self._blocks, strict=True):
            if state is _State.READY and block is not None:
                yield block

    # -- how it comes and goes ---------------------------------------------------------------------

    def reserve(self, block: TierBlock) -> int | None:
        """A slot to fill with a block that is not held, another's if need be. None while every slot is
        pinned or filling. The slot stays the caller's until `commit` or `abandon`."""
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
        """The slot holds its block's bytes: the block is ready."""
        self._must_be(slot, _State.FILLING)
        block = self.block(slot)
        self._states[slot] = _State.READY
        self._ready += 1
        self._idle += 1
        self._policy.insert(block.key)
        if self._removed.pop(block.key, None) is None:
            self._stored[block.key] = block

    def abandon(self, slot: int) -> None:
        """The block will not come. Nobody may write to the slot any more."""
        self._must_be(slot, _State.FILLING)
        del self._slots[self.block(slot).key]
        self._release(slot)

    def pin(self, slot: int) -> None:
        """Keep a ready block where it is. Pins are counted."""
        self._must_be(slot, _State.READY)
        if not self._pins[slot]:
            self._idle -= 1
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Take one pin back."""
        if not self._pins[slot]:
            raise ValueError(f"slot {slot} is not pinned")
        self._pins[slot] -= 1
        if not self._pins[slot]:
            self._idle += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request used these blocks, named in the order of its prompt. Once for each request, since
        policies count uses; those too that it found on the device, which are as much in use. Blocks that
        are not ready are ignored."""
        for key in reversed(keys):
            self._policy.touch(key)

    def take_changes(self) -> TierChange:
        """How what is ready differs from what it was at the last call. At most `capacity` blocks each way,
        however much came and went."""
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
