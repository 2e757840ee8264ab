"""The index's state of each worker over time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvBatch, KvEventKind, KvSnapshotPart, KvState, KvStatus, Medium
from kvasir.native._twin import record
from kvasir.ports.routing import RoutingTarget
from kvasir_router.index import CancelSnapshot, CatchUpLimits, FetchSnapshot, FleetIndex, IndexMode

MakeIdentity = Callable[..., WorkerIdentity]

LIMITS = CatchUpLimits(
    pending_batches=3, pending_bytes=400, slice_blocks=8, backoff_min_s=0.1, backoff_max_s=0.8
)
TTL_S = 10.0
CHAIN = array("Q", range(101, 113))
EMPTY = [0, 0, 0, 0]


def stored(names: Sequence[int], rank: int = 0, medium: Medium = Medium.DEVICE, parent: int = 0) -> bytes:
    return record(KvEventKind.STORED, medium, rank, parent, array("Q", names))


def removed(names: Sequence[int], rank: int = 0) -> bytes:
    return record(KvEventKind.REMOVED, Medium.DEVICE, rank, 0, array("Q", names))


class Bench:
    """An index with workers of two ranks, and a clock that tests set; every step is checked."""

    def __init__(self, make_identity: MakeIdentity, capacity: int = 1000, predicted: int = 100) -> None:
        self.make_identity = make_identity
        self.now = 0.0
        self.effects: list[FetchSnapshot | CancelSnapshot] = []
        self.index = FleetIndex(
            capacity_blocks=capacity,
            predicted_blocks=predicted,
            predicted_ttl_s=TTL_S,
            confirm_s=0.5,
            limits=LIMITS,
        )

    def add(self, worker_id: str = "w", mode: IndexMode = IndexMode.REPORTED, reports: bool = True) -> None:
        identity = replace(self.make_identity(worker_id, ranks=2), reports_kv=reports)
        self.index.add(worker_id, identity, mode, self.now)

    def fetch(self) -> FetchSnapshot:
        (effect,) = self.index.take_effects()
        assert isinstance(effect, FetchSnapshot)
        return effect

    def part(
        self, fetch: FetchSnapshot, log: bytes, sequence: int = 0, epoch: int = 1, last: bool = True
    ) -> None:
        part = KvSnapshotPart(epoch, sequence, log, last)
        self.index.snapshot_part(fetch.worker_id, fetch.attempt, part, self.now)
        self.index.check_integrity()

    def end(self, fetch: FetchSnapshot, error: str | None = None, *, final: bool = False) -> None:
        self.index.snapshot_ended(fetch.worker_id, fetch.attempt, error, self.now, final=final)
        self.index.check_integrity()

    def exact(self, worker_id: str = "w", log: bytes = b"", mode: IndexMode = IndexMode.REPORTED) -> None:
        self.add(worker_id, mode)
        fetch = self.fetch()
        self.part(fetch, log)
        self.end(fetch)
        assert self.status(worker_id).state is KvState.EXACT

    def say(self, sequence: int, log: bytes = b"", epoch: int = 1, worker_id: str = "w") -> None:
        self.index.apply(worker_id, KvBatch(epoch, sequence, log), self.now)
        self.index.check_integrity()

    def pass_time(self, seconds: float) -> None:
        """Tick whenever that is due."""
        until = self.now + seconds
        while (due := self.index.next_due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.effects += self.index.tick(self.now)
        self.now = until
        self.index.check_integrity()

    def row(self, rank: int = 0, worker_id: str = "w", names: array[int] = CHAIN) -> list[int]:
        row: list[int] = self.index.match(names)[self.index.group(RoutingTarget(worker_id, rank))].tolist()
        return row

    def status(self, worker_id: str = "w") -> KvStatus:
        status = self.index.status(worker_id)
        assert status is not None
        return status


@pytest.fixture
def bench(make_identity: MakeIdentity) -> Bench:
    return Bench(make_identity)


# -- reports -------------------------------------------------------------------------------------


def test_nothing_of_a_snapshot_is_believed_before_its_call_has_ended_well(bench: Bench) -> None:
    bench.add()
    fetch = bench.fetch()
    bench.part(fetch, stored(CHAIN[:2]), last=False)
    bench.part(fetch, stored(CHAIN[2:4], parent=CHAIN[1]))
    assert (bench.row(), bench.status().state) == (EMPTY, KvState.CATCHING_UP)
    bench.end(fetch)
    assert (bench.row(), bench.status().state) == ([4, 4, 4, 4], KvState.EXACT)
    assert bench.status().blocks == 4


def test_batches_that_came_meanwhile_follow_the_snapshot_and_those_it_contains_are_skipped(
    bench: Bench,
) -> None:
    bench.add()
    fetch = bench.fetch()
    bench.say(4, stored(CHAIN[:9]))
    bench.say(5, removed(CHAIN[2:3]))
    bench.part(fetch, stored(CHAIN[:4]), sequence=4)
    bench.say(6, stored(CHAIN[1:2], medium=Medium.CPU))
    bench.end(fetch)
    bench.pass_time(0.1)
    assert bench.row() == [2, 2, 2, 2]
    assert bench.status().sequence == 6


def test_media_are_told_apart_and_ranks_too(bench: Bench) -> None:
    log = stored(CHAIN[:2]) + stored(CHAIN[2:5], medium=Medium.DISK, parent=CHAIN[1]) + stored(CHAIN[:1], 1)
    bench.exact(log=log)
    assert bench.row(0) == [2, 2, 5, 5]
    assert bench.row(1) == [1, 1, 1, 1]
    assert bench.index.held_blocks(RoutingTarget("w", 0)) == 2


@pytest.mark.parametrize(
    ("epoch", "sequence"), [(1, 1), (1, 0), (0, 2)], ids=["repeated", "old", "past epoch"]
)
def test_what_was_said_before_changes_nothing(bench: Bench, epoch: int, sequence: int) -> None:
    bench.exact()
    bench.say(1, stored(CHAIN[:3]))
    bench.say(sequence, removed(CHAIN[:3]), epoch)
    assert (bench.row(), bench.status().state) == ([3, 3, 3, 3], KvState.EXACT)


@pytest.mark.parametrize(
    ("epoch", "sequence", "why"),
    [(1, 3, "batches after 1 and before 3 are missing"), (2, 1, "epoch 2 has begun")],
)
def test_after_a_gap_nothing_old_is_believed_and_a_snapshot_makes_it_exact_again(
    bench: Bench, epoch: int, sequence: int, why: str
) -> None:
    bench.exact()
    bench.say(1, stored(CHAIN[:3]))
    bench.now = 100.0
    bench.say(sequence, b"", epoch)
    status = bench.status()
    assert (bench.row(), status.state, status.reason) == (EMPTY, KvState.CATCHING_UP, why)
    fetch = bench.fetch()
    assert fetch.epoch == epoch
    bench.part(fetch, stored(CHAIN[:1]), sequence=3, epoch=epoch)
    bench.end(fetch)
    assert (bench.row(), bench.status().resyncs) == ([1, 1, 1, 1], 1)


def test_a_snapshot_that_does_not_join_the_batches_after_it_is_taken_again(bench: Bench) -> None:
    bench.add()
    fetch = bench.fetch()
    bench.say(9)
    bench.part(fetch, b"", sequence=5)
    bench.end(fetch)
    assert bench.status().state is KvState.CATCHING_UP
    bench.pass_time(1.0)
    (again,) = bench.effects
    assert isinstance(again, FetchSnapshot)
    bench.part(again, b"", sequence=9)
    bench.end(again)
    assert bench.status().state is KvState.EXACT


@pytest.mark.parametrize("parts", [0, 1])
def test_a_snapshot_without_its_last_part_is_taken_again(bench: Bench, parts: int) -> None:
    bench.add()
    fetch = bench.fetch()
    for _ in range(parts):
        bench.part(fetch, stored(CHAIN), last=False)
    bench.end(fetch)
    assert (bench.row(), bench.status().state) == (EMPTY, KvState.CATCHING_UP)
    assert bench.status().reason == "the snapshot ended before its last part"


def test_a_snapshot_of_an_earlier_epoch_is_taken_again(bench: Bench) -> None:
    bench.add()
    fetch = bench.fetch()
    bench.say(1, epoch=2)
    bench.part(fetch, stored(CHAIN), sequence=7, epoch=1)
    assert bench.status().reason == "the snapshot is of epoch 1, and 2 has begun"


@pytest.mark.parametrize("size", [0, 200], ids=["many", "large"])
def test_when_more_changes_than_may_wait_the_snapshot_begins_again(bench: Bench, size: int) -> None:
    bench.add()
    fetch = bench.fetch()
    for sequence in range(1, 5):
        bench.say(sequence, stored(range(1, size // 8)) if size else b"")
    assert bench.status().reason == "more has changed than may wait for a snapshot"
    assert bench.index.take_effects() == [CancelSnapshot("w")]
    bench.part(fetch, stored(CHAIN))
    bench.end(fetch)
    assert bench.row() == EMPTY


def test_parts_of_a_life_that_is_over_are_ignored(bench: Bench) -> None:
    bench.add()
    old = bench.fetch()
    bench.index.remove("w")
    bench.add()
    fetch = bench.fetch()
    bench.part(old, stored(CHAIN))
    bench.end(old)
    assert bench.status().state is KvState.CATCHING_UP
    bench.part(fetch, stored(CHAIN[:1]))
    bench.end(fetch)
    assert bench.row() == [1, 1, 1, 1]


def test_snapshots_that_fail_are_tried_again_at_a_slower_pace_that_has_a_floor(bench: Bench) -> None:
    bench.add()
    fetch, waits = bench.fetch(), []
    for _ in range(6):
        bench.end(fetch, "the worker is busy")
        assert bench.status().reason == "the worker is busy"
        due = bench.index.next_due()
        assert due is not None
        waits.append(round(due - bench.now, 3))
        bench.now = due
        (effect,) = bench.index.tick(due)
        assert isinstance(effect, FetchSnapshot)
        fetch = effect
    assert waits == [0.1, 0.2, 0.4, 0.8, 0.8, 0.8]
    bench.part(fetch, stored(CHAIN[:1]))
    bench.end(fetch)
    assert bench.status().state is KvState.EXACT


@pytest.mark.parametrize(
    ("log", "why"),
    [(b"\x07", "its log is malformed"), (stored(CHAIN[:1], rank=2), "its log is malformed")],
    ids=["noise", "a rank it does not have"],
)
def test_a_worker_that_makes_no_sense_is_not_believed_until_its_next_epoch(
    bench: Bench, log: bytes, why: str
) -> None:
    bench.exact()
    bench.say(1, stored(CHAIN[:3]))
    bench.say(2, log)
    status = bench.status()
    assert (bench.row(), status.state) == (EMPTY, KvState.PREDICTED)
    assert status.reason.startswith(why)
    bench.say(3, stored(CHAIN[:3]))
    assert (bench.row(), bench.index.next_due() is not None) == (EMPTY, bench.index.stats().unswept > 0)
    bench.say(1, epoch=2)
    assert bench.status().state is KvState.CATCHING_UP


def test_a_worker_that_never_gives_snapshots_is_predicted_with_its_reason(bench: Bench) -> None:
    bench.add(mode=IndexMode.HYBRID)
    bench.end(bench.fetch(), "no record is kept", final=True)
    assert (bench.status().state, bench.status().reason) == (KvState.PREDICTED, "no record is kept")
    bench.index.predict(RoutingTarget("w"), CHAIN, bench.now)
    assert bench.row() == [12, 12, 12, 12]


def test_a_worker_that_is_demoted_is_predicted_until_its_next_epoch(bench: Bench) -> None:
    bench.exact(log=stored(CHAIN[:3]), mode=IndexMode.HYBRID)
    bench.index.demote("w", "its hits are not what it reports", bench.now)
    assert (bench.row(), bench.status().reason) == (EMPTY, "its hits are not what it reports")
    bench.say(1, stored(CHAIN[:3]))
    assert bench.row() == EMPTY


def test_a_worker_that_does_not_fit_in_is_predicted_and_the_others_stay_exact(
    make_identity: MakeIdentity,
) -> None:
    bench = Bench(make_identity, capacity=10)
    bench.exact("a", stored(CHAIN[:6]))
    bench.exact("b")
    bench.say(1, stored(CHAIN[:6]), worker_id="b")
    assert bench.status("b").reason == "the index is full: raise routing.index_blocks"
    assert (bench.row(worker_id="a"), bench.row(worker_id="b")) == ([6, 6, 6, 6], EMPTY)
    bench.pass_time(60.0)
    assert bench.effects == []
    bench.index.remove("a")
    bench.pass_time(1.0)
    (again,) = bench.effects
    assert isinstance(again, FetchSnapshot)
    bench.part(again, stored(CHAIN[:6]), sequence=1)
    bench.end(again)
    assert bench.status("b").state is KvState.EXACT


# -- predictions ---------------------------------------------------------------------------------


def test_a_prediction_is_found_at_once_and_stays_until_the_report_has_come(bench: Bench) -> None:
    bench.exact(mode=IndexMode.HYBRID)
    handle = bench.index.predict(RoutingTarget("w", 1), CHAIN[:5], bench.now)
    assert (bench.row(1), bench.row(0)) == ([5, 5, 5, 5], EMPTY)
    assert bench.index.held_blocks(RoutingTarget("w", 1)) == 5
    bench.say(1, stored(CHAIN[:4], rank=1))
    bench.index.settle(RoutingTarget("w", 1), handle, bench.now)
    assert bench.row(1) == [5, 5, 5, 5]
    bench.pass_time(0.6)
    assert bench.row(1) == [4, 4, 4, 4]


def test_what_was_cancelled_is_forgotten_at_once(bench: Bench) -> None:
    bench.exact(mode=IndexMode.HYBRID)
    mine = bench.index.predict(RoutingTarget("w"), CHAIN[:5], bench.now)
    bench.index.predict(RoutingTarget("w"), CHAIN[:2], bench.now)
    bench.index.forget(RoutingTarget("w"), mine)
    assert bench.row() == [2, 2, 2, 2]


@pytest.mark.parametrize("mode", [IndexMode.HYBRID, IndexMode.PREDICTED])
def test_of_a_worker_that_reports_nothing_predictions_stand_until_they_are_old(
    bench: Bench, mode: IndexMode
) -> None:
    bench.add(mode=mode, reports=mode is IndexMode.PREDICTED)
    assert bench.index.take_effects() == []
    assert bench.status().state is KvState.PREDICTED
    handle = bench.index.predict(RoutingTarget("w"), CHAIN, bench.now)
    bench.index.settle(RoutingTarget("w"), handle, bench.now)
    bench.pass_time(TTL_S * 0.99)
    assert bench.row() == [12, 12, 12, 12]
    bench.pass_time(TTL_S * 0.1)
    assert bench.row() == EMPTY
    assert bench.index.next_due() is None


def test_in_mode_reported_nothing_is_foreseen(bench: Bench) -> None:
    bench.exact(mode=IndexMode.REPORTED)
    assert bench.index.predict(RoutingTarget("w"), CHAIN, bench.now) == 0
    assert bench.row() == EMPTY


def test_what_is_still_to_come_survives_the_change_to_a_snapshots_view(bench: Bench) -> None:
    bench.add(mode=IndexMode.HYBRID)
    fetch = bench.fetch()
    handle = bench.index.predict(RoutingTarget("w"), CHAIN[:3], bench.now)
    assert bench.row() == [3, 3, 3, 3]
    bench.part(fetch, stored(CHAIN[:1]))
    bench.end(fetch)
    assert bench.row() == [3, 3, 3, 3]
    bench.index.settle(RoutingTarget("w"), handle, bench.now)
    bench.pass_time(1.0)
    assert bench.row() == [1, 1, 1, 1]


def test_predictions_beyond_their_bound_make_room_oldest_first(make_identity: MakeIdentity) -> None:
    bench = Bench(make_identity, predicted=4)
    bench.add("a", IndexMode.PREDICTED)
    bench.index.predict(RoutingTarget("a", 0), CHAIN[:3], bench.now)
    bench.index.predict(RoutingTarget("a", 1), CHAIN[:3], bench.now)
    assert (bench.row(0, "a"), bench.row(1, "a")) == ([1, 1, 1, 1], [3, 3, 3, 3])


# -- places and time -----------------------------------------------------------------------------


def test_a_place_that_is_not_known_has_a_row_that_is_always_empty(bench: Bench) -> None:
    bench.exact(log=stored(CHAIN), mode=IndexMode.HYBRID)
    for target in (RoutingTarget("stranger"), RoutingTarget("w", 2), RoutingTarget("w", -1)):
        assert bench.index.predict(target, CHAIN, bench.now) == 0
        bench.index.settle(target, 1, bench.now)
        bench.index.forget(target, 1)
        assert bench.index.match(CHAIN)[bench.index.group(target)].tolist() == EMPTY
        assert bench.index.held_blocks(target) == 0
    assert bench.index.status("stranger") is None


def test_the_revision_grows_whenever_a_group_does(bench: Bench) -> None:
    groups, revisions = [], []
    steps: list[Callable[[], object]] = [
        bench.exact,
        lambda: bench.say(1, stored(CHAIN)),
        lambda: bench.say(9),
        lambda: bench.index.demote("w", "", bench.now),
        lambda: bench.index.remove("w"),
    ]
    for step in steps:
        step()
        groups.append(bench.index.group(RoutingTarget("w")))
        revisions.append(bench.index.revision)
    for number in range(1, len(steps)):
        if groups[number] != groups[number - 1]:
            assert revisions[number] > revisions[number - 1]
    assert revisions[0] == revisions[1]


def test_a_worker_that_leaves_vanishes_at_once_and_is_reclaimed_in_slices(bench: Bench) -> None:
    bench.exact(log=stored(range(1000, 1040)))
    bench.index.remove("w")
    assert max(bench.index.match(array("Q", range(1000, 1040)))[:, 0]) == 0
    left = []
    while (due := bench.index.next_due()) is not None:
        bench.index.tick(due)
        left.append(bench.index.stats().unswept)
    assert len(left) > 2
    assert left == sorted(left, reverse=True)
    assert bench.index.stats().names == 0


def test_the_suffix_of_a_snapshot_is_applied_in_slices_between_decisions(make_identity: MakeIdentity) -> None:
    bench = Bench(make_identity)
    bench.add()
    fetch = bench.fetch()
    names = [range(10 * n + 1, 10 * n + 11) for n in range(3)]
    for sequence, some in enumerate(names, start=1):
        bench.say(sequence, stored(some))
    bench.part(fetch, b"")
    bench.end(fetch)
    assert bench.status().state is KvState.CATCHING_UP
    bench.say(4, removed(names[0]))
    bench.pass_time(1.0)
    assert (bench.status().state, bench.status().sequence, bench.status().blocks) == (KvState.EXACT, 4, 20)


def test_when_all_have_left_nothing_is_kept(bench: Bench) -> None:
    for worker_id in ("a", "b", "c"):
        bench.exact(worker_id, stored(CHAIN), IndexMode.HYBRID)
        bench.index.predict(RoutingTarget(worker_id), CHAIN, bench.now)
    for worker_id in ("a", "b", "c"):
        bench.index.remove(worker_id)
    bench.pass_time(2 * TTL_S)
    stats = bench.index.stats()
    assert (stats.blocks, stats.names, stats.unswept, stats.groups) == (0, 0, 0, 1)
    assert bench.index.next_due() is None
