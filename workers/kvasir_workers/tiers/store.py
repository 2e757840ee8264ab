"""The store of an engine's blocks below the device: one arena, and lower tiers below it.

Calls of the step loop return at once; threads, one for each lower tier, look up, fetch and write. A request
is promised a block only once the block is in the arena, verified and pinned, so that the following copy to
the device cannot fail. A lower tier that is slow, full or broken is a miss.

One lock guards the state. It is held only for bookkeeping, never during a call of a tier. A slot that a
thread may still write to is not reused until the thread's call has returned, even if its request ended long
ago.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.tier import TierBlock, TierChange, TierRead
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.changes import ChangeLog, in_chains
from kvasir_workers.tiers.health import TierCounters
from kvasir_workers.tiers.levels import (
    MARGIN_S,
    READ_BYTES,
    LowerTier,
    LowerTierSettings,
    MakeLane,
    TierContext,
)
from kvasir_workers.tiers.threads import TierThread, Urgency

DRAIN_S = 1.0


class _State(Enum):
    ASKING = "asking"
    WAITING = "waiting"
    DONE = "done"


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks that one request needs. `slots` are those of the leading ones, pinned for it; `tier` is the
    lower tier queried for the next one, by one job at a time. WAITING: another fetch is filling the next
    slot."""

    blocks: tuple[TierBlock, ...]
    slots: list[int] = field(default_factory=list)
    tier: int = 0
    state: _State = _State.WAITING
    deadline: float = 0.0


class TierStore:
    """See the module. All methods are called from the step loop's thread; none waits for a tier.

    `view(slot)` returns a slot's bytes, `block_bytes` of them. `lower` are the tiers in the order of lookup.
    """

    def __init__(
        self,
        arena: Arena,
        view: Callable[[int], memoryview],
        block_bytes: int,
        lower: Sequence[LowerTierSettings],
        now: Callable[[], float],
        *,
        make_lane: MakeLane = TierThread,
    ) -> None:
        self._arena = arena
        self._view = view
        self._block_bytes = block_bytes
        self._now = now
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._fetches: dict[str, _Fetch] = {}
        self._waiters: dict[bytes, list[_Fetch]] = {}
        self._filling: dict[int, TierBlock] = {}
        self._storing: set[bytes] = set()
        self._changes = ChangeLog()
        self._cpu = TierCounters(Medium.CPU, block_bytes, arena.capacity * block_bytes)
        context = TierContext(arena, view, block_bytes, self._lock, self._changes)
        self._chunk = context.chunk(READ_BYTES)
        self._levels = [LowerTier(number, each, context, now, make_lane) for number, each in enumerate(lower)]
        self._closed = False

    @property
    def capacity(self) -> int:
        """Number of slots of the arena."""
        return self._arena.capacity

    # -- fetching ----------------------------------------------------------------------------------

    def begin(self, request_id: str, blocks: Sequence[TierBlock]) -> None:
        """Start to fetch these consecutive blocks, and keep the leading ones that are found in the arena
        until `end`."""
        self.end(request_id)
        fetch = _Fetch(tuple(blocks))
        with self._lock:
            self._fetches[request_id] = fetch
            self._advance(fetch)

    def ready(self, request_id: str) -> int | None:
        """Return how many leading blocks are in the arena; None while the fetch runs, at most until the
        deadline of the queried tier. Raise KeyError if `begin` was not called."""
        with self._lock:
            fetch = self._fetches[request_id]
            if fetch.state is not _State.DONE and self._now() > fetch.deadline:
                fetch.state = _State.DONE
            return len(fetch.slots) if fetch.state is _State.DONE else None

    def stop(self, request_id: str) -> int:
        """Wait for no more blocks of a fetch; return how many leading ones are in the arena. What a tier is
        being asked for gets there later. Raise KeyError if `begin` was not called."""
        with self._lock:
            fetch = self._fetches[request_id]
            fetch.state = _State.DONE
            return len(fetch.slots)

    def slots(self, request_id: str, first: int, count: int) -> list[int]:
        """Return the slots of `count` ready blocks from number `first` on."""
        with self._lock:
            return self._fetches[request_id].slots[first : first + count]

    def end(self, request_id: str) -> None:
        """End a fetch and unpin its blocks. Unknown ids are ignored."""
        with self._lock:
            fetch = self._fetches.pop(request_id, None)
            if fetch is None:
                return
            fetch.state = _State.DONE
            for slot in fetch.slots:
                self._arena.unpin(slot)

    @property
    def fetching(self) -> bool:
        """Whether a fetch waits for a lower tier."""
        with self._lock:
            return any(fetch.state is not _State.DONE for fetch in self._fetches.values())

    def nap(self, seconds: float) -> None:
        """Return when a fetch has progressed, or after `seconds`: for a step loop without other work."""
        with self._progress:
            self._progress.wait(seconds)

    # -- writing -----------------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[TierBlock]) -> list[int | None]:
        """Return slots to fill with these consecutive blocks; None for a block that is held, which counts as
        a use, and for one without room, after which all are None."""
        slots: list[int | None] = [None] * len(blocks)
        held: list[bytes] = []
        with self._lock:
            for at, block in enumerate(blocks):
                if self._arena.holds(block.key):
                    held.append(block.key)
                    continue
                slot = self._arena.reserve(block)
                if slot is None:
                    self._cpu.add(dropped_blocks=len(blocks) - at)
                    break
                self._filling[slot] = block
                self._storing.add(block.key)
                slots[at] = slot
            self._arena.touch(held)
        return slots

    def committed(self, slots: Sequence[int], *, below: bool = True) -> None:
        """Mark these slots as filled, and write them to the lower tiers in the background unless `below` is
        False."""
        with self._lock:
            for slot in slots:
                self._commit(slot)
            if below:
                for level in self._levels:
                    level.write_locked(slots)
        self._cpu.stored(len(slots))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a request uses these blocks, wherever they come from; in the order of its prompt."""
        with self._lock:
            self._arena.touch(keys)

    # -- reports -----------------------------------------------------------------------------------

    def loaded(self, blocks: int, seconds: float) -> None:
        """Count blocks that were copied from the arena to the device in that time."""
        self._cpu.loaded(blocks, seconds)

    def loads(self) -> tuple[TierLoad, ...]:
        """Return the load of every tier, fastest first."""
        with self._lock:
            held, evicted = self._arena.ready, self._arena.evicted
        cpu = replace(
            self._cpu.load, blocks=held, bytes_used=held * self._block_bytes, evicted_blocks=evicted
        )
        return (cpu, *(level.load() for level in self._levels))

    def take_logs(self, most: int) -> list[bytes]:
        """Return the changes of the tiers' contents, as at most `most` logs of bounded size; the rest is
        returned by later calls."""
        with self._lock:
            self._take_arena_changes()
            return self._changes.take(most)

    def announce(self) -> None:
        """Report the complete contents of every tier."""
        with self._lock:
            self._take_arena_changes()
            self._changes.restart()
            self._changes.add(Medium.CPU, TierChange(stored=tuple(in_chains(self._arena.blocks()))))
        for level in self._levels:
            level.announce()

    @property
    def unsettled(self) -> bool:
        """Whether changes are pending or will soon occur: blocks wait to be written to a tier that answers,
        or a tier has not read all of its earlier contents."""
        with self._lock:
            waiting = bool(self._changes)
        return waiting or any(level.unsettled for level in self._levels)

    def close(self) -> None:
        """Write what can be written within a second, and free everything. Idempotent."""
        closed, self._closed = self._closed, True
        for level in () if closed else self._levels:
            level.close(DRAIN_S)

    # -- fetch state (with the lock held) ------------------------------------------------------------

    def _advance(self, fetch: _Fetch) -> None:
        """Pin the blocks that are in the arena, and handle the first one that is not."""
        self._pin(fetch)
        at = len(fetch.slots)
        if at == len(fetch.blocks):
            self._finish(fetch)
        elif self._arena.holds(fetch.blocks[at].key):
            self._await(fetch, fetch.blocks[at].key)
        else:
            self._ask(fetch)

    def _pin(self, fetch: _Fetch) -> None:
        for block in fetch.blocks[len(fetch.slots) :]:
            slot = self._arena.find(block.key)
            if slot is None:
                return
            self._arena.pin(slot)
            fetch.slots.append(slot)

    def _await(self, fetch: _Fetch, key: bytes) -> None:
        fetch.state = _State.WAITING
        # A block from the device is ready when the step that copies it has ended, however long that takes.
        longest = math.inf if key in self._storing else max(lv.lower.timeout_s for lv in self._levels)
        fetch.deadline = self._now() + longest + MARGIN_S
        self._waiters.setdefault(key, []).append(fetch)

    def _ask(self, fetch: _Fetch) -> None:
        """Look up the missing blocks in the next tier that answers."""
        fetch.state = _State.ASKING
        for level in self._levels[fetch.tier :]:
            fetch.tier = level.number
            job = partial(self._look_up, fetch, level)
            if not level.stuck and level.lane.add(Urgency.LOOKUP, job):
                fetch.deadline = self._now() + level.lower.lookup_s + MARGIN_S
                return
        self._finish(fetch)

    def _finish(self, fetch: _Fetch) -> None:
        fetch.state = _State.DONE
        self._progress.notify_all()

    def _missing(self, fetch: _Fetch, most: int) -> list[TierBlock]:
        """Return the next blocks of a fetch that are neither in the arena nor being fetched."""
        found: list[TierBlock] = []
        at = len(fetch.slots)
        for block in fetch.blocks[at : at + most]:
            if self._arena.holds(block.key):
                break
            found.append(block)
        return found

    def _reserve_missing(self, fetch: _Fetch, most: int) -> list[int]:
        slots: list[int] = []
        for block in self._missing(fetch, most):
            slot = self._arena.reserve(block)
            if slot is None:
                break
            self._filling[slot] = block
            slots.append(slot)
        return slots

    def _commit(self, slot: int) -> None:
        block = self._filling.pop(slot)
        self._storing.discard(block.key)
        self._arena.commit(slot)
        self._wake(block.key)

    def _abandon(self, slot: int) -> None:
        block = self._filling.pop(slot)
        self._arena.abandon(slot)
        self._wake(block.key)

    def _wake(self, key: bytes) -> None:
        for fetch in self._waiters.pop(key, ()):
            if fetch.state is _State.WAITING:
                self._advance(fetch)

    def _take_arena_changes(self) -> None:
        self._changes.add(Medium.CPU, self._arena.take_changes())

    # -- on the tiers' threads ---------------------------------------------------------------------

    def _look_up(self, fetch: _Fetch, level: LowerTier) -> None:
        with self._lock:
            if fetch.state is not _State.ASKING:
                return
            self._pin(fetch)
            missing = self._missing(fetch, len(fetch.blocks))
            if not missing:
                self._advance(fetch)
                return
        found = level.tier.lookup([block.key for block in missing])
        with self._lock:
            if fetch.state is _State.ASKING:
                # Blocks after a gap in this tier may be in the next one, as may the gap's.
                self._read_on(fetch, level, found, more=found == len(missing))

    def _read_on(self, fetch: _Fetch, level: LowerTier, left: int, *, more: bool) -> None:
        """Read the next `left` blocks from a tier; `more` says that it may have further ones."""
        fetch.deadline = self._now() + level.lower.timeout_s + MARGIN_S
        if left > 0 and level.lane.add(Urgency.READ, partial(self._read, fetch, level, left, more)):
            return
        fetch.tier = level.number if more and left <= 0 else level.number + 1
        self._advance(fetch)

    def _read(self, fetch: _Fetch, level: LowerTier, left: int, more: bool) -> None:
        with self._lock:
            if fetch.state is not _State.ASKING:
                return
            before = len(fetch.slots)
            self._pin(fetch)
            left -= len(fetch.slots) - before
            slots = self._reserve_missing(fetch, min(left, self._chunk))
            if not slots:
                if left <= 0:
                    self._read_on(fetch, level, 0, more=more)
                elif self._missing(fetch, 1):
                    self._finish(fetch)  # nothing in the arena can be evicted
                else:
                    self._advance(fetch)  # another fetch reads the next one
                return
            reads = [TierRead(self._filling[slot].key, self._view(slot)) for slot in slots]
        whole = level.tier.get(reads)
        with self._lock:
            for slot in slots[:whole]:
                self._commit(slot)
            for slot in slots[whole:]:
                self._abandon(slot)
            # A hit is also written to the faster tiers, but never back to its own.
            for faster in self._levels[: level.number]:
                faster.write_locked(slots[:whole])
            self._progress.notify_all()
            if fetch.state is not _State.ASKING:
                return
            self._pin(fetch)
            if whole == len(slots):
                self._read_on(fetch, level, left - whole, more=more)
            else:
                fetch.tier = level.number + 1
                self._advance(fetch)
