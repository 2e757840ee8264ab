"""One tier below the arena with its thread: its queue of writes, and the reports of its contents.

Blocks to be written are pinned in the arena until they are written, so their number is bounded: what exceeds
it is not written, and counted. A tier with a call that does not return is skipped, and reported as in
trouble, until the call returns.
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
"""Maximum bytes of one call. Between two calls the thread runs jobs by urgency, and lookups wait only a few
milliseconds."""
CHUNK_BLOCKS = 64
MARGIN_S = 0.002
"""Time that a call may take beyond the tier's own deadline, for thread scheduling."""
SHARE = 4
"""Pending writes of one tier may take one in this many slots of the arena."""


MakeLane = Callable[[str, Callable[[], float], Tend], TierThread]


@dataclass(frozen=True, slots=True)
class LowerTierSettings:
    """A tier below the arena. A lookup that takes longer than `lookup_s`, or a read that takes longer than
    `timeout_s`, is a miss; at most `write_bytes` may wait to be written."""

    tier: KvTier
    lookup_s: float
    timeout_s: float
    write_bytes: int


@dataclass(frozen=True, slots=True)
class TierContext:
    """State shared by an engine's tiers, and the lock that guards it. `view(slot)` returns a slot's bytes,
    `block_bytes` of them."""

    arena: Arena
    view: Callable[[int], memoryview]
    block_bytes: int
    lock: threading.Lock
    changes: ChangeLog

    def chunk(self, most_bytes: int) -> int:
        """Number of blocks in one call."""
        return max(1, min(CHUNK_BLOCKS, most_bytes // self.block_bytes))


class LowerTier:
    """One lower tier; `number` tiers are before it. Methods whose name ends in `_locked` are called with the
    lock held."""

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
        """Return whether a call has not returned long after its deadline; changes are logged."""
        stuck = self.lane.stuck(self.lower.timeout_s + self.lower.lookup_s + MARGIN_S)
        if stuck != self._was_stuck:
            self._was_stuck = stuck
            if stuck:
                _log.warning("tier %s: a call does not return; it is disabled until it does", self._name)
            else:
                _log.warning("tier %s: the call has returned; the tier is used again", self._name)
        return stuck

    @property
    def unsettled(self) -> bool:
        """Whether its reported contents will soon change."""
        return bool(self._writes or self._writing or not self.lane.tended) and not self.stuck

    def write_locked(self, slots: Sequence[int]) -> None:
        """Queue the blocks of these slots to be written, up to the limit."""
        taken = slots[: max(0, self._most_writes - len(self._writes))]
        for slot in taken:
            self._context.arena.pin(slot)
            self._writes.append(slot)
        self._dropped += len(slots) - len(taken)
        if self._writes and not self._writing:
            self._writing = self.lane.add(Urgency.WRITE, self._write)

    def announce(self) -> None:
        """Report all that it holds."""
        self.lane.add(Urgency.LOOKUP, self._announce)

    def load(self) -> TierLoad:
        """See KvTier, including blocks that were never passed to the tier."""
        load = self.tier.load()
        load = replace(load, dropped_blocks=load.dropped_blocks + self._dropped)
        if self.stuck:
            trouble = f"a call has not returned for over {self.lower.timeout_s:g} s: check the medium"
            load = replace(load, trouble=trouble, readable=False)
        return load

    def close(self, drain_s: float) -> None:
        """Write what can be written within `drain_s`, and free everything except what a hanging call uses."""
        if self.lane.close(drain_s):
            self.tier.close()

    # -- on the thread -----------------------------------------------------------------------------

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
