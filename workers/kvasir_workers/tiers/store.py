"""Where an engine's blocks go below the device, and come back from: one arena, and lower tiers behind it.

The step loop asks and is answered at once; threads, one for each lower tier, find, fetch and write. A request
is promised a block only once it lies in the arena, verified and pinned, so that the copy onto the device that
follows cannot fail. Whatever is slow, full or broken below is a block that is not there.

One lock guards the books. It is held for bookkeeping alone and never while a tier is called; a slot that a
thread may still write to is in no one else's hands until the thread has come back, however long ago its
request has gone.
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
    """Blocks that one request wants. `slots` are those of the leading ones, pinned for it; `tier` is the
    lower tier that is asked for the next one, by one job at a time. WAITING is for a slot that somebody else
    fills."""

    blocks: tuple[TierBlock, ...]
    slots: list[int] = field(default_factory=list)
    tier: int = 0
    state: _State = _State.WAITING
    deadline: float = 0.0


class TierStore:
    """See the module. All methods are called from the step loop's thread; none of them waits for a tier.

    `view(slot)` is a slot's bytes, `block_bytes` of them. `lower` is in the order in which tiers are asked.
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

    # -- fetching ----------------------------------------------------------------------------------

    def begin(self, request_id: str, blocks: Sequence[TierBlock]) -> None:
        """Find these blocks, which follow each other, and keep the leading ones that there are in the arena
        until `end`."""
        self.end(request_id)
        fetch = _Fetch(tuple(blocks))
        with self._lock:
            self._fetches[request_id] = fetch
            self._advance(fetch)

    def ready(self, request_id: str) -> int | None:
        """How many leading blocks lie in the arena; None while that is still being found out, which it is
        until the deadline of the tier that is asked. Raises KeyError for what has not begun."""
        with self._lock:
            fetch = self._fetches[request_id]
            if fetch.state is not _State.DONE and self._now() > fetch.deadline:
                fetch.state = _State.DONE
            return len(fetch.slots) if fetch.state is _State.DONE else None

    def slots(self, request_id: str, first: int, count: int) -> list[int]:
        """Where the blocks `first`, `first + 1`, … of those that are ready lie."""
        with self._lock:
            return self._fetches[request_id].slots[first : first + count]

    def end(self, request_id: str) -> None:
        """Nobody needs what was fetched any more. Unknown ids are ignored."""
        with self._lock:
            fetch = self._fetches.pop(request_id, None)
            if fetch is None:
                return
            fetch.state = _State.DONE
            for slot in fetch.slots:
                self._arena.unpin(slot)

    @property
    def fetching(self) -> bool:
        """Whether somebody waits for a lower tier."""
        with self._lock:
            return any(fetch.state is not _State.DONE for fetch in self._fetches.values())

    def nap(self, seconds: float) -> None:
        """Return when a fetch has come on, and after that time at the latest: for a step loop with nothing
        else to do."""
        with self._progress:
            self._progress.wait(seconds)

    # -- writing -----------------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[TierBlock]) -> list[int | None]:
        """Slots to fill with these blocks, which follow each other; None for one that is held, which counts
        as used, and for one that has no room, whose followers get none either."""
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
        """These slots are filled, and go on to the lower tiers in the background unless `below` is False."""
        with self._lock:
            for slot in slots:
                self._commit(slot)
            if below:
                for level in self._levels:
                    level.write_locked(slots)
        self._cpu.stored(len(slots))

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request uses these blocks, wherever it has them from; named in the order of its prompt."""
        with self._lock:
            self._arena.touch(keys)

    # -- what others are told ----------------------------------------------------------------------

    def loaded(self, blocks: int, seconds: float) -> None:
        """So many blocks were copied from the arena onto the device in that time."""
        self._cpu.loaded(blocks, seconds)

    def loads(self) -> tuple[TierLoad, ...]:
        """Every tier, fastest first."""
        with self._lock:
            held, evicted = self._arena.ready, self._arena.evicted
        cpu = replace(
            self._cpu.load, blocks=held, bytes_used=held * self._block_bytes, evicted_blocks=evicted
        )
        return (cpu, *(level.load() for level in self._levels))

    def take_logs(self, most: int) -> list[bytes]:
        """What has changed of what the tiers hold, as at most that many logs of bounded size; the rest comes
        with the next calls."""
        with self._lock:
            self._take_arena_changes()
            return self._changes.take(most)

    def announce(self) -> None:
        """Say from the beginning what every tier holds."""
        with self._lock:
            self._take_arena_changes()
            self._changes.restart()
            self._changes.add(Medium.CPU, TierChange(stored=tuple(in_chains(self._arena.blocks()))))
        for level in self._levels:
            level.announce()

    @property
    def unsettled(self) -> bool:
        """Whether changes wait to be told, or will soon come about: blocks wait to be written to a tier that
        answers, or a tier has not read all that it kept from before."""
        with self._lock:
            waiting = bool(self._changes)
        return waiting or any(level.unsettled for level in self._levels)

    def close(self) -> None:
        """Write what can be written within a second, and free everything. Idempotent."""
        closed, self._closed = self._closed, True
        for level in () if closed else self._levels:
            level.close(DRAIN_S)

    # -- the course of a fetch (with the lock held) --------------------------------------------------

    def _advance(self, fetch: _Fetch) -> None:
        """Pin what lies in the arena, and see to the first block that does not."""
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
        # What comes from the device is there when the step that copies it has ended, however long that takes.
        longest = math.inf if key in self._storing else max(lv.lower.timeout_s for lv in self._levels)
        fetch.deadline = self._now() + longest + MARGIN_S
        self._waiters.setdefault(key, []).append(fetch)

    def _ask(self, fetch: _Fetch) -> None:
        """Have the next tier that answers look for what is missing."""
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
        """The next blocks of a fetch that are neither in the arena nor on their way."""
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

    # -- on the lanes ------------------------------------------------------------------------------

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
                # What follows a gap in this tier may be in the next one, with what fills the gap.
                self._read_on(fetch, level, found, more=found == len(missing))

    def _read_on(self, fetch: _Fetch, level: LowerTier, left: int, *, more: bool) -> None:
        """Have the next `left` blocks read from a tier; `more` says that it may have what follows them."""
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
                    self._finish(fetch)  # nothing in the arena can give way
                else:
                    self._advance(fetch)  # somebody else fetches the next one
                return
            reads = [TierRead(self._filling[slot].key, self._view(slot)) for slot in slots]
        whole = level.tier.get(reads)
        with self._lock:
            for slot in slots[:whole]:
                self._commit(slot)
            for slot in slots[whole:]:
                self._abandon(slot)
            # A hit goes to the faster tiers too, and is never written back to where it was.
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
