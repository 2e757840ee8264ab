"""Follows one worker's reports: exact while no batch is missing, and exact again through a snapshot and its
suffix.

    EXACT ── gap, new epoch ──▶ CATCHING_UP ── last part, then every batch after it ──▶ EXACT
      └────────── malformed log, no room ──────────────────▶ PREDICTED ── new epoch ──▶ CATCHING_UP

Contents from before a gap are dropped at once, since some of them are gone. A snapshot is stored in groups
that lookups do not use; they replace the worker's groups when nothing is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvasir.core.invariants import require
from kvasir.core.kv import KvBatch, KvSnapshotPart, KvState
from kvasir_router.index.contract import CancelSnapshot, CatchUpLimits, FetchSnapshot, IndexEffect
from kvasir_router.index.places import Places, RankGroups
from kvasir_router.index.shared import split_log

FULL = "the index is full: raise routing.index_blocks"
_NAME_BYTES = 8


class WorkerReports:
    """One worker's log, from the beginning of a session.

    `held` is what lookups may use; `moved(now)` is called after it has changed. With `predicts` there are
    always groups for predictions; without, only while EXACT. `attempts` numbers snapshots over all workers,
    `emit` receives effects, `make_room` returns whether it freed anything in a full index. A worker that
    `shares` a store has groups for that too while EXACT, and `missing` receives the blocks that the worker
    reports as gone from the store.
    """

    def __init__(
        self,
        worker_id: str,
        ranks: int,
        places: Places,
        limits: CatchUpLimits,
        *,
        predicts: bool,
        shares: bool,
        attempts: Iterator[int],
        emit: Callable[[IndexEffect], None],
        moved: Callable[[float], None],
        missing: Callable[[bytes], None],
        make_room: Callable[[], bool],
    ) -> None:
        self._worker_id = worker_id
        self._ranks = ranks
        self._places = places
        self._limits = limits
        self._predicts = predicts
        self._shares = shares
        self._attempts = attempts
        self._emit = emit
        self._moved = moved
        self._missing = missing
        self._make_room = make_room
        self.held = self._nothing()
        self.state = KvState.PREDICTED
        self.reason = ""
        self.since_s = 0.0
        self.epoch = 0
        self.sequence = 0
        self.resyncs = 0
        self.due: float | None = None
        self._follows = False
        self._void = False
        self._failures = 0
        self._attempt: int | None = None
        self._hidden = RankGroups(())
        self._base: int | None = None
        self._complete = False
        self._draining = False
        self._pending: deque[KvBatch] = deque()
        self._pending_bytes = 0

    def begin(self, now: float, *, unreported: str | None) -> None:
        """Begin a session. `unreported` says why no reports are expected, None if they are."""
        if unreported is not None:
            self._renew(KvState.PREDICTED, unreported, now)
            return
        self._follows = True
        self._await_report("the session has begun", now)

    def end(self) -> tuple[int, ...]:
        """End the session and drop what is held. Return the groups of the shared store, which the caller
        closes."""
        self._abandon_attempt()
        self._places.close(self.held.own)
        remote = self.held.remote
        self.held = self._nothing()
        self._follows = False
        return remote

    def doubt(self, reason: str, now: float, *, void: bool = False) -> None:
        """Stop using the worker's reports until its next epoch; with `void`, drop its predictions too."""
        self._abandon_attempt()
        self._void = void
        self._renew(KvState.PREDICTED, reason, now)

    def retry(self, now: float) -> None:
        """Room was freed: retry if the index was full, at the slowest pace."""
        if self._follows and self.state is KvState.PREDICTED and self.reason == FULL:
            self._renew(KvState.CATCHING_UP, self.reason, now)
            self.due = now + self._limits.backoff_max_s

    def batch(self, batch: KvBatch, now: float) -> None:
        """Handle a batch of changes."""
        if not self._follows or batch.epoch < self.epoch:
            return
        renewed = batch.epoch > self.epoch
        self.epoch = batch.epoch
        if self.state is KvState.CATCHING_UP:
            self._wait(batch, renewed, now)
        elif renewed:
            self._catch_up(f"epoch {batch.epoch} has begun", now)
        elif self.state is KvState.EXACT and batch.sequence > self.sequence:
            if batch.sequence != self.sequence + 1:
                self._catch_up(_hole(self.sequence, batch.sequence), now)
            elif self._apply(self.held, batch.log, now):
                self.sequence = batch.sequence

    def part(self, attempt: int, part: KvSnapshotPart, now: float) -> None:
        """Handle a part of the fetched snapshot; parts of earlier attempts are ignored."""
        if attempt != self._attempt or self._complete:
            return
        if self._base is None:
            if part.epoch < self.epoch:
                self._again(f"the snapshot is of epoch {part.epoch}, and {self.epoch} has begun", now)
                return
            if part.epoch > self.epoch:
                self._forget_pending()
            try:
                opened = self._places.open(2 * self._ranks if self._shares else self._ranks)
            except OverflowError:
                self.doubt(FULL, now)
                return
            self._hidden = RankGroups(opened[: self._ranks], opened[self._ranks :])
            self.epoch, self._base = part.epoch, part.sequence
        elif (part.epoch, part.sequence) != (self.epoch, self._base):
            self.doubt("the parts of its snapshot are of different moments", now)
            return
        if self._apply(self._hidden, part.log, now):
            self._complete = part.last

    def ended(self, attempt: int, error: str | None, now: float, *, final: bool) -> None:
        """The snapshot's call ended; `final`: a retry is useless."""
        if attempt != self._attempt:
            return
        self._attempt = None
        if error is not None and final:
            self.doubt(error, now)
        elif error is not None:
            self._again(error, now)
        elif self._base is None or not self._complete:
            self._again("the snapshot ended before its last part", now)
        else:
            self.sequence = self._base
            self._draining = True
            self._drain(now)

    def tick(self, now: float) -> None:
        """Continue after a delay; due at `due`."""
        if self.due is None or self.due > now:
            return
        self.due = None
        if self._draining:
            self._drain(now)
        elif self.state is KvState.CATCHING_UP:
            self._attempt = next(self._attempts)
            self._emit(FetchSnapshot(self._worker_id, self._attempt, self.epoch))

    @property
    def groups(self) -> tuple[int, ...]:
        """What the worker holds itself, by rank."""
        return self.held.own

    @property
    def all_groups(self) -> tuple[int, ...]:
        """Every group in use here, in lookups or not."""
        return (*self.held.own, *self.held.remote, *self._hidden.own, *self._hidden.remote)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the fault, unless every invariant holds."""
        fetching = self._attempt is not None
        if self.state is not KvState.CATCHING_UP:
            require(
                not (fetching or self._draining or self._hidden.own or self._pending),
                "catches up without a snapshot",
            )
            require(self.due is None, "a timer that is not needed")
        else:
            require(fetching or self.due is not None, "neither a fetch nor a timer")
        require(len(self._pending) <= self._limits.pending_batches, "too many pending batches")
        require(self._pending_bytes == sum(len(b.log) for b in self._pending), "pending bytes are miscounted")
        require(self._pending_bytes <= self._limits.pending_bytes, "too many pending bytes")
        if self.state is KvState.EXACT:
            require(self._places.nowhere not in self.groups, "exact without groups")
        shared = self._ranks if self._shares and self.state is KvState.EXACT else 0
        require(len(self.held.remote) == shared, "reports of a shared store without trust")

    # -- states ----------------------------------------------------------------------------------

    def _catch_up(self, reason: str, now: float) -> None:
        self.resyncs += 1
        if now - self.since_s >= self._limits.backoff_max_s:
            self._failures = 0
        self._await_report(reason, now)

    def _await_report(self, reason: str, now: float) -> None:
        """Nothing is known; a snapshot will be fetched."""
        self._void = False
        self.sequence = 0
        self._renew(KvState.CATCHING_UP, reason, now)
        self._schedule(now)
        self.tick(now)

    def _renew(self, state: KvState, reason: str, now: float) -> None:
        old, self.held = self.held, self._nothing()
        self._close(old)
        if self._predicts and not self._void:
            try:
                self.held = RankGroups(self._places.open(self._ranks))
            except OverflowError:
                # Without groups nothing is predicted either, and decisions treat the worker as cold.
                reason = FULL
        self._enter(state, reason, now)
        self._moved(now)

    def _enter(self, state: KvState, reason: str, now: float) -> None:
        self.state, self.reason, self.since_s = state, reason, now

    # -- catching up -----------------------------------------------------------------------------

    def _again(self, reason: str, now: float) -> None:
        self._abandon_attempt()
        self.reason = reason
        self._schedule(now)

    def _schedule(self, now: float) -> None:
        limits = self._limits
        wait_s = 0.0
        if self._failures:
            # Bound the exponent before the power.
            wait_s = min(limits.backoff_max_s, limits.backoff_min_s * 2.0 ** min(self._failures - 1, 16))
        self._failures += 1
        self.due = now + wait_s

    def _abandon_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt = None
            self._emit(CancelSnapshot(self._worker_id))
        self._close(self._hidden)
        self._hidden = RankGroups(())
        self._base = None
        self._complete = self._draining = False
        self._forget_pending()
        self.due = None

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0

    def _wait(self, batch: KvBatch, renewed: bool, now: float) -> None:
        """Buffer a batch during the snapshot. Earlier batches are part of it."""
        if renewed:
            if self._base is not None:
                self._again(f"epoch {batch.epoch} has begun", now)
                return
            self._forget_pending()
        if self._attempt is None and not self._draining:
            return
        if self._pending:
            last = self._pending[-1].sequence
            if batch.sequence <= last:
                return
            if batch.sequence != last + 1:
                if self._base is not None and self._base < batch.sequence - 1:
                    self._again(_hole(last, batch.sequence), now)
                    return
                # The snapshot has not begun, and may be newer than the gap.
                self._forget_pending()
        self._pending.append(batch)
        self._pending_bytes += len(batch.log)
        limits = self._limits
        if len(self._pending) > limits.pending_batches or self._pending_bytes > limits.pending_bytes:
            self._again("more has changed than may wait for a snapshot", now)

    def _drain(self, now: float) -> None:
        """Apply some of the changes since the snapshot; with all of them applied the state is exact."""
        budget = self._limits.slice_blocks * _NAME_BYTES
        while self._pending and budget > 0:
            batch = self._pending.popleft()
            self._pending_bytes -= len(batch.log)
            budget -= len(batch.log)
            if batch.sequence <= self.sequence:
                continue
            if batch.sequence != self.sequence + 1:
                self._again(_hole(self.sequence, batch.sequence), now)
                return
            if not self._apply(self._hidden, batch.log, now):
                return
            self.sequence = batch.sequence
        if self._pending:
            self.due = now + self._limits.pace_s
            return
        old, self.held, self._hidden = self.held, self._hidden, RankGroups(())
        self._close(old)
        self._abandon_attempt()
        self._enter(KvState.EXACT, "", now)
        self._moved(now)

    def _apply(self, held: RankGroups, log: bytes, now: float) -> bool:
        try:
            while not self._lay(held, log):
                if not self._make_room():
                    self.doubt(FULL, now)
                    return False
        except (ValueError, KeyError) as error:
            self.doubt(f"its log is malformed: {error}", now)
            return False
        return True

    def _lay(self, held: RankGroups, log: bytes) -> bool:
        """Apply a log. Return False if the index has no room for all of it; the log may be applied again."""
        tree = self._places.tree
        try:
            if not self._shares:
                tree.apply(held.own, log)
                return True
            own, remote, missing = split_log(log)
            tree.apply(held.own, own)
            tree.apply(held.remote, remote)
        except OverflowError:
            return False
        if missing:
            self._missing(missing)
        return True

    def _nothing(self) -> RankGroups:
        return RankGroups((self._places.nowhere,) * self._ranks)

    def _close(self, held: RankGroups) -> None:
        self._places.close(held.own)
        self._places.close(held.remote)


def _hole(last: int, found: int) -> str:
    return f"batches after {last} and before {found} are missing"
