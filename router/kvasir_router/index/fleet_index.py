"""The prefix index of the fleet: every worker's reports and the router's own predictions, in one tree.

It is pure: each call passes the time, and fetches are returned as effects. Lookups work in every state of a
worker; untrusted contents are not found.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir.core.identity import WorkerIdentity
from kvasir.core.invariants import require
from kvasir.core.kv import KvBatch, KvSnapshotPart, KvState, KvStatus, Medium
from kvasir.native import PREDICTED, TreeStats
from kvasir.ports.routing import RoutingTarget
from kvasir_router.index.contract import CatchUpLimits, IndexEffect, IndexMode, IndexViewId
from kvasir_router.index.places import Places
from kvasir_router.index.predictions import Predictions
from kvasir_router.index.reports import WorkerReports
from kvasir_router.index.shared import SharedTiers
from kvasir_router.index.survey import SLICE_BLOCKS, PrefixSurvey

NOT_REPORTING = "the worker does not report what it holds"
NOT_ASKED = "its pool is routed to by prediction"


@dataclass(frozen=True, slots=True)
class _Known:
    """One worker. `store` is the remote store that it shares with others, "" for none."""

    mode: IndexMode
    reports: WorkerReports
    store: str
    epoch: int


class FleetIndex:
    """The caches of the whole fleet.

    `capacity_blocks` bounds the blocks held, counted once for each worker and medium, and `predicted_blocks`
    the predictions among them, which live for `predicted_ttl_s`. What a worker computed is expected in its
    reports within `confirm_s`. Reports of a shared store outlive their worker by `shared_keep_s`. No call but
    `status`, `stats` and `check_integrity` does more than a slice of work (see CatchUpLimits); `tick`, due at
    `next_due`, does the rest.
    """

    def __init__(
        self,
        *,
        capacity_blocks: int,
        predicted_blocks: int,
        predicted_ttl_s: float,
        confirm_s: float = 0.5,
        shared_keep_s: float = 3600.0,
        limits: CatchUpLimits | None = None,
    ) -> None:
        self._limits = limits or CatchUpLimits()
        self._places = Places(capacity_blocks=capacity_blocks, predicted_blocks=predicted_blocks)
        self._predictions = Predictions(
            self._places.tree,
            ttl_s=predicted_ttl_s,
            confirm_s=confirm_s,
            slice_blocks=self._limits.slice_blocks,
        )
        self._shared = SharedTiers(self._places, keep_s=shared_keep_s)
        self._workers: dict[str, _Known] = {}
        # Workers with a timer.
        self._timed: dict[str, WorkerReports] = {}
        # The last effect for each worker; a later one replaces it.
        self._effects: dict[str, IndexEffect] = {}
        self._attempts = itertools.count(1)
        self._not_before = 0.0
        # The latest time that a caller passed.
        self._now = 0.0
        # Whether a worker left since workers that did not fit were last retried.
        self._left = False
        self.revision = 0
        """Grows whenever the result of `group` may have changed for some place."""

    # -- workers ---------------------------------------------------------------------------------

    def add(self, worker_id: str, identity: WorkerIdentity, mode: IndexMode, now: float) -> None:
        """Add a worker's new session; its cache is unknown."""
        self.remove(worker_id)
        self._now = now
        store, ranks = identity.shared_tier, identity.data_parallel_size

        def moved(now: float) -> None:
            self._moved(worker_id, now)

        def emit(effect: IndexEffect) -> None:
            self._effects[worker_id] = effect

        def missing(log: bytes) -> None:
            self._shared.missing(store, log, ranks)

        reports = WorkerReports(
            worker_id,
            ranks,
            self._places,
            self._limits,
            predicts=mode is not IndexMode.REPORTED,
            shares=bool(store),
            attempts=self._attempts,
            emit=emit,
            moved=moved,
            missing=missing,
            make_room=self._shared.make_room,
        )
        self._workers[worker_id] = _Known(mode, reports, store, identity.epoch)
        if store:
            self._shared.join(store, worker_id, identity.epoch)
        unreported = NOT_ASKED if mode is IndexMode.PREDICTED else None
        reports.begin(now, unreported=unreported if identity.reports_kv else NOT_REPORTING)
        self._time(worker_id, reports)

    def remove(self, worker_id: str) -> None:
        """The session ended: drop what the worker holds, except in a store that others share. Takes constant
        time; memory is reclaimed in slices."""
        known = self._workers.pop(worker_id, None)
        if known is None:
            return
        remote = known.reports.end()
        if known.store:
            self._shared.leave(known.store, worker_id, known.epoch, remote, self._now)
        self._predictions.drop(worker_id)
        self._timed.pop(worker_id, None)
        self._left = True
        self.revision += 1

    def demote(self, worker_id: str, reason: str, now: float, *, void: bool = False) -> None:
        """Stop using the worker's reports until its next epoch; with `void`, predict nothing of it either. If
        its reports are not in use, only the reason changes."""
        known = self._workers.get(worker_id)
        if known is None:
            return
        if void or known.reports.state is not KvState.PREDICTED:
            known.reports.doubt(reason, now, void=void)
            self._time(worker_id, known.reports)
        else:
            known.reports.reason = reason

    def apply(self, worker_id: str, batch: KvBatch, now: float) -> None:
        """Apply a batch of cache changes; ignored for a worker that is unknown or not tracked by reports."""
        self._now = now
        known = self._workers.get(worker_id)
        if known is not None:
            known.reports.batch(batch, now)
            self._time(worker_id, known.reports)

    def snapshot_part(self, worker_id: str, attempt: int, part: KvSnapshotPart, now: float) -> None:
        """Apply a part of a fetched snapshot, in order."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.reports.part(attempt, part, now)
            self._time(worker_id, known.reports)

    def snapshot_ended(
        self, worker_id: str, attempt: int, error: str | None, now: float, *, final: bool = False
    ) -> None:
        """The call for a snapshot ended; `final`: after this error, a retry is useless."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.reports.ended(attempt, error, now, final=final)
            self._time(worker_id, known.reports)

    def take_effects(self) -> list[IndexEffect]:
        """Return the effects since the last call, at most one for each worker."""
        if not self._effects:
            return []
        effects = list(self._effects.values())
        self._effects.clear()
        return effects

    # -- decisions -------------------------------------------------------------------------------

    def group(self, target: RoutingTarget) -> int:
        """Return the row of `match` for this place; a row of zeros if nothing there may be used. Valid until
        `revision` changes."""
        known = self._workers.get(target.worker_id)
        if known is None:
            return self._places.nowhere
        groups, rank = known.reports.held.own, target.rank
        return groups[rank] if 0 <= rank < len(groups) else self._places.nowhere

    def match(self, names: array[int]) -> NDArray[np.uint32]:
        """Return how much of a prompt each place holds: item [group, m] is the length, in blocks, of the
        longest prefix whose every block is in medium m (kvasir.core.kv.Medium) or a faster one. Predictions
        count as device; blocks in a shared store count for each of its workers. Valid until the next call."""
        depths = self._places.match(names)
        if self._shared:
            self._shared.extend(names, depths)
        return depths

    def held_blocks(self, target: RoutingTarget) -> int:
        """Number of blocks on the device there, or predicted to be."""
        group, tree = self.group(target), self._places.tree
        return tree.held(group, Medium.DEVICE) + tree.held(group, PREDICTED)

    def predict(self, target: RoutingTarget, names: array[int], now: float) -> int:
        """Predict that the place will hold this prefix. Return the prediction, to be ended by `settle` or
        `forget`, or 0 if nothing is predicted."""
        group = self.group(target)
        if group == self._places.nowhere or not names or self._mode(target) is IndexMode.REPORTED:
            return 0
        return self._predictions.add(target.worker_id, target.rank, group, names, now)

    def settle(self, target: RoutingTarget, prediction: int, now: float) -> None:
        """The prefix was computed there. If the worker reports, the prediction ends soon after; if not, it
        stays until it expires."""
        known = self._workers.get(target.worker_id)
        if known is None or not prediction:
            return
        if known.reports.state is KvState.PREDICTED:
            self._predictions.keep(target.worker_id, prediction)
        else:
            self._predictions.confirm(target.worker_id, prediction, now)

    def forget(self, target: RoutingTarget, prediction: int) -> None:
        """The prefix will not be computed there."""
        self._predictions.forget(target.worker_id, prediction)

    # -- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[IndexEffect]:
        """Do what is due: retries of snapshots, slices of bulk work. Return `take_effects`."""
        self._now = now
        for worker_id, reports in list(self._timed.items()):
            reports.tick(now)
            self._time(worker_id, reports)
        self._shared.expire(now)
        if now >= self._not_before:
            self._bulk(now)
        return self.take_effects()

    def next_due(self) -> float | None:
        """Return when `tick` is due; None if no time is set."""
        due = self._predictions.next_due()
        if self._places.unswept:
            due = self._not_before
        elif due is not None:
            due = max(due, self._not_before)
        waiting = (self._shared.next_due(), *(reports.due for reports in self._timed.values()))
        return min((each for each in (due, *waiting) if each is not None), default=None)

    # -- views -----------------------------------------------------------------------------------

    def state(self, worker_id: str) -> KvState:
        """Return how exact the view of the worker's cache is. Raises KeyError."""
        return self._workers[worker_id].reports.state

    def status(self, worker_id: str) -> KvStatus | None:
        """Return the worker's cache as it is known here; None for an unknown worker."""
        known = self._workers.get(worker_id)
        if known is None:
            return None
        reports = known.reports
        return KvStatus(
            state=reports.state,
            reason=reports.reason,
            since_s=reports.since_s,
            epoch=reports.epoch,
            sequence=reports.sequence,
            blocks=self._places.reported((*reports.held.own, *reports.held.remote)),
            predicted_blocks=self._places.predicted(reports.groups),
            resyncs=reports.resyncs,
        )

    def picture(self, worker_id: str) -> IndexViewId | None:
        """Return the source of predictions for the worker; None for an unknown worker."""
        known = self._workers.get(worker_id)
        if known is None:
            return None
        return IndexViewId(known.reports.state, known.reports.epoch, known.reports.resyncs)

    def stats(self) -> TreeStats:
        """Return the sizes of the tree, and the drops since the start."""
        return self._places.tree.stats()

    def surveyed(self, survey: PrefixSurvey) -> Iterator[None]:
        """Add to `survey` what workers report, up to its bound and as much of each. Yields between slices;
        workers may come and go meanwhile."""
        share = max(SLICE_BLOCKS, survey.room // max(1, len(self._workers)))
        for worker_id in list(self._workers):
            rank, cursor, room = 0, 0, min(share, survey.room)
            while (group := self.group(RoutingTarget(worker_id, rank))) != self._places.nowhere:
                if room <= 0:
                    survey.complete = False
                    break
                before = survey.read_blocks
                log, cursor = self._places.tree.export(group, 0, cursor, min(SLICE_BLOCKS, room))
                survey.add(worker_id, log)
                room -= survey.read_blocks - before
                if cursor < 0:
                    rank, cursor = rank + 1, 0
                yield

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the fault, unless every invariant holds."""
        self._places.tree.check_integrity()
        require(self._places.predicted((self._places.nowhere,)) == 0, "a prediction in the empty group")
        require(self._places.reported((self._places.nowhere,)) == 0, "a block in the empty group")
        groups = [group for known in self._workers.values() for group in known.reports.all_groups]
        groups += self._shared.kept_groups
        opened = [group for group in groups if group != self._places.nowhere]
        require(len(set(opened)) == len(opened), "two places share a group")
        require(self.stats().groups == len(opened) + 1, "groups without an owner")
        for worker_id, known in self._workers.items():
            require((known.reports.due is not None) == (worker_id in self._timed), "a timer is not tracked")
            known.reports.check_integrity()
        require(self._predictions.workers <= self._workers.keys(), "predictions of a worker that is gone")

    # -- internals -------------------------------------------------------------------------------

    def _bulk(self, now: float) -> None:
        for worker_id, prediction in self._predictions.confirmed(now):
            self._report_was_due(worker_id, prediction)
        self._predictions.expire(now)
        if self._places.unswept:
            self._places.sweep(self._limits.slice_blocks)
            if self._left and not self._places.unswept:
                self._left = False
                self._room_again(now)
        self._not_before = now + self._limits.pace_s

    def _mode(self, target: RoutingTarget) -> IndexMode:
        return self._workers[target.worker_id].mode

    def _time(self, worker_id: str, reports: WorkerReports) -> None:
        if reports.due is None:
            self._timed.pop(worker_id, None)
        else:
            self._timed[worker_id] = reports

    def _moved(self, worker_id: str, now: float) -> None:
        self.revision += 1
        known = self._workers[worker_id]
        reports = known.reports
        if known.store:
            self._shared.moved(known.store, worker_id, reports.held)
        if self._places.nowhere in reports.groups:
            self._predictions.drop(worker_id)
        else:
            self._predictions.carry(worker_id, reports.groups, now)

    def _report_was_due(self, worker_id: str, prediction: int) -> None:
        if self._workers[worker_id].reports.state is KvState.EXACT:
            self._predictions.forget(worker_id, prediction)
        else:
            self._predictions.keep(worker_id, prediction)

    def _room_again(self, now: float) -> None:
        for worker_id, known in self._workers.items():
            known.reports.retry(now)
            self._time(worker_id, known.reports)
