"""A tier below the arena with its thread: what waits to be written to it, and what it tells of itself.

Writes are pinned in the arena until they are done, so they are bounded: what does not fit is not written, and
counted. A tier that does not return is passed by, and said to be in trouble, until it returns.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.tier import KvTier, TierBlock, TierChange, TierWrite
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.changes import ChangeLog, in_chains
from kvasir_workers.tiers.threads import Tend, TierThread, Urgency

_log = logging.getLogger(__name__)

READ_BYTES = 2 << 20
WRITE_BYTES = 1 << 20
"""What one call reads or writes at most. Between two calls a lane turns to whoever waits, and questions wait
for a few milliseconds only."""
CHUNK_BLOCKS = 64
MARGIN_S = 0.002
"""What a call may take beyond the tier's own deadline, for the threads to be scheduled."""
SHARE = 4
"""What waits for one tier may take one part of the arena in so many."""


MakeLane = Callable[[str, Callable[[], float], Tend], TierThread]


@dataclass(frozen=True, slots=True)
class LowerTierSettings:
    """A tier below the arena. A question that takes longer than `lookup_s`, or a read that takes longer than
    `timeout_s`, is a miss; at most `write_bytes` wait to be written."""

    tier: KvTier
    lookup_s: float
    timeout_s: float
    write_bytes: int


@dataclass(frozen=True, slots=True)
class TierContext:
    """What an engine's tiers share, and the lock that guards it. `view(slot)` is a slot's bytes,
    `block_bytes` of them."""

    arena: Arena
    view: Callable[[int], memoryview]
    block_bytes: int
    lock: threading.Lock
    changes: ChangeLog

    def chunk(self, most_bytes: int) -> int:
        """Blocks of one call."""
        return max(1, min(CHUNK_BLOCKS, most_bytes // self.block_bytes))


class LowerTier:
    """One lower tier, `number` of which are before it. Methods whose name ends in `_locked` are called with
    the lock held."""

    def __init__(
        self,
        number: int,
        lower: LowerTierSettings,
        context: TierContext,
        now: Callable[[], float],
        make_lane: MakeLane,
    ) -> None:
        self.number = number
        self.lower = lower
        self.tier = lower.tier
        self._context = context
        self._most_writes = max(
            1, min(lower.write_bytes // context.block_bytes, context.arena.capacity // SHARE)
        )
        self._writes: deque[int] = deque()
        self._writing = False
        self._dropped = 0
        self._was_stuck = False
        self._name = lower.tier.medium.name.lower()
        self.lane = make_lane(self._name, now, self._tend)

    @property
    def medium(self) -> Medium:
        """See KvTier."""
        return self.tier.medium

    @property
    def stuck(self) -> bool:
        """Whether a call has not returned long after its deadline; a change is logged."""
        stuck = self.lane.stuck(self.lower.timeout_s + self.lower.lookup_s + MARGIN_S)
        if stuck != self._was_stuck:
            self._was_stuck = stuck
            if stuck:
                _log.warning("tier %s: a call does not return; it is not used until it does", self._name)
            else:
                _log.warning("tier %s: the call has returned; it is used again", self._name)
        return stuck

    @property
    def unsettled(self) -> bool:
        """Whether what it holds will change soon of itself."""
        return bool(self._writes or self._writing or not self.lane.tended) and not self.stuck

    def write_locked(self, slots: Sequence[int]) -> None:
        """Queue what lies in these slots to be written, as far as it fits."""
        taken = slots[: max(0, self._most_writes - len(self._writes))]
        for slot in taken:
            self._context.arena.pin(slot)
            self._writes.append(slot)
        self._dropped += len(slots) - len(taken)
        if self._writes and not self._writing:
            self._writing = self.lane.add(Urgency.WRITE, self._write)

    def announce(self) -> None:
        """Say everything that it holds."""
        self.lane.add(Urgency.LOOKUP, self._announce)

    def load(self) -> TierLoad:
        """See KvTier, with what was never handed to the tier."""
        load = self.tier.load()
        load = replace(load, dropped_blocks=load.dropped_blocks + self._dropped)
        if self.stuck:
            trouble = f"a call has not returned for over {self.lower.timeout_s:g} s: look at the medium"
            load = replace(load, trouble=trouble, readable=False)
        return load

    def close(self, drain_s: float) -> None:
        """Write what can be written in that time, and free everything but what a call still hangs in."""
        if self.lane.close(drain_s):
            self.tier.close()

    # -- on the lane -------------------------------------------------------------------------------

    def _write(self) -> None:
        context = self._context
        with context.lock:
            slots = [
                self._writes.popleft() for _ in range(min(context.chunk(WRITE_BYTES), len(self._writes)))
            ]
            writes = [TierWrite(context.arena.block(slot), context.view(slot)) for slot in slots]
        self._tell(self.tier.put(writes))
        with context.lock:
            for slot in slots:
                context.arena.unpin(slot)
            self._writing = False
            self.write_locked(())

    def _tend(self) -> bool:
        change = self.tier.maintain()
        self._tell(change)
        return self.tier.maintenance_pending or bool(change.stored or change.removed)

    def _announce(self) -> None:
        held: list[TierBlock] = in_chains(self.tier.held())
        self._tell(TierChange(stored=tuple(held)))

    def _tell(self, change: TierChange) -> None:
        with self._context.lock:
            self._context.changes.add(self.medium, change)
