"""A store that several workers read: blocks that any of them reported are found for all of them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvBatch, KvEventKind, KvSnapshotPart, KvState, Medium
from kvasir.native._twin import record
from kvasir.ports.routing import RoutingTarget
from kvasir_router.index import FetchSnapshot, FleetIndex, IndexMode
from kvasir_router.index.shared import split_log

MakeIdentity = Callable[..., WorkerIdentity]

KEEP_S = 60.0
CHAIN = array("Q", range(101, 113))
REMOTE, DISK, DEVICE = Medium.REMOTE, Medium.DISK, Medium.DEVICE


def stored(names: Sequence[int], medium: Medium = REMOTE, rank: int = 0) -> bytes:
    return record(KvEventKind.STORED, medium, rank, 0, array("Q", names))


def removed(names: Sequence[int], medium: Medium = REMOTE, rank: int = 0) -> bytes:
    return record(KvEventKind.REMOVED, medium, rank, 0, array("Q", names))


class Fleet:
    """An index with workers that report at once; every step is checked."""

    def __init__(self, make_identity: MakeIdentity, capacity: int = 1000) -> None:
        self.make_identity = make_identity
        self.now = 0.0
        self.sequences: dict[str, int] = {}
        self.index = FleetIndex(
            capacity_blocks=capacity, predicted_blocks=50, predicted_ttl_s=1e6, shared_keep_s=KEEP_S
        )

    def join(
        self,
        worker_id: str,
        log: bytes = b"",
        *,
        store: str = "redis",
        epoch: int = 1,
        ranks: int = 1,
        mode: IndexMode = IndexMode.HYBRID,
    ) -> None:
        identity = self.make_identity(worker_id, epoch=epoch, ranks=ranks)
        self.index.add(worker_id, replace(identity, reports_kv=True, shared_tier=store), mode, self.now)
        self.catch_up(worker_id, log)

    def catch_up(self, worker_id: str, log: bytes) -> None:
        for effect in self.index.tick(self.now):
            if isinstance(effect, FetchSnapshot):
                assert effect.worker_id == worker_id
                part = KvSnapshotPart(max(1, effect.epoch), 0, log, True)
                self.index.snapshot_part(worker_id, effect.attempt, part, self.now)
                self.index.snapshot_ended(worker_id, effect.attempt, None, self.now)
        self.sequences[worker_id] = 0
        self.index.check_integrity()

    def say(self, worker_id: str, log: bytes) -> None:
        status = self.index.status(worker_id)
        assert status is not None
        self.sequences[worker_id] += 1
        self.index.apply(worker_id, KvBatch(status.epoch, self.sequences[worker_id], log), self.now)
        self.index.check_integrity()

    def leave(self, worker_id: str) -> None:
        self.index.remove(worker_id)
        self.index.check_integrity()

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.index.next_due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.index.tick(self.now)
        self.now = until
        self.index.tick(self.now)
        self.index.check_integrity()

    def row(self, worker_id: str, rank: int = 0, names: array[int] = CHAIN) -> list[int]:
        row: list[int] = self.index.match(names)[self.index.group(RoutingTarget(worker_id, rank))].tolist()
        return row


@pytest.fixture
def fleet(make_identity: MakeIdentity) -> Fleet:
    return Fleet(make_identity)


def test_what_one_has_stored_is_found_for_each_that_shares_the_store(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:6]))
    fleet.join("b", ranks=2)
    fleet.join("apart", store="")
    fleet.join("elsewhere", store="another redis")
    assert fleet.row("b", 0) == fleet.row("b", 1) == fleet.row("a") == [0, 0, 0, 6]
    assert fleet.row("apart") == fleet.row("elsewhere") == [0, 0, 0, 0]


def test_a_prefix_goes_on_from_ones_own_media_to_the_store_and_back(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[2:5]) + stored(CHAIN[7:9]))
    fleet.join("b", stored(CHAIN[:2], DEVICE) + stored(CHAIN[5:7], DISK) + stored(CHAIN[9:10], DEVICE))
    fleet.join("c")
    assert fleet.row("b") == [2, 2, 2, 10]
    assert fleet.row("c") == [0, 0, 0, 0]


def test_a_worker_of_which_nothing_is_known_is_found_for_what_others_have_stored(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]))
    fleet.join("mute", mode=IndexMode.PREDICTED)
    fleet.index.predict(RoutingTarget("mute"), CHAIN[:6], fleet.now)
    assert fleet.row("mute") == [6, 6, 6, 6]
    assert fleet.row("mute", names=array("Q", [*CHAIN[:5], 7])) == [5, 5, 5, 5]


def test_a_block_is_in_the_store_until_the_last_who_reported_it_says_otherwise(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]))
    fleet.join("b", stored(CHAIN[:4]))
    fleet.say("a", removed(CHAIN[:4]))
    assert fleet.row("a") == fleet.row("b") == [0, 0, 0, 4]
    fleet.say("b", removed(CHAIN[1:4]))
    assert fleet.row("a") == fleet.row("b") == [0, 0, 0, 1]


def test_a_worker_that_begins_anew_clears_only_what_it_said_itself(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]))
    fleet.join("b", stored(CHAIN[:2]) + stored(CHAIN[:2], DEVICE))
    fleet.say("b", record(KvEventKind.CLEARED, REMOTE, 0, 0, array("Q")))
    assert fleet.row("b") == [2, 2, 2, 4]


def test_what_a_dead_worker_has_stored_outlives_it_for_as_long_as_the_store_keeps_it(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]) + stored(CHAIN[:9], DEVICE))
    fleet.join("b")
    fleet.leave("a")
    assert fleet.row("b") == [0, 0, 0, 4]
    fleet.pass_time(KEEP_S * 0.9)
    assert fleet.row("b") == [0, 0, 0, 4]
    fleet.pass_time(KEEP_S * 0.2)
    assert fleet.row("b") == [0, 0, 0, 0]
    assert fleet.index.stats().blocks == 0


def test_who_finds_a_dead_workers_block_missing_takes_it_off(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]) + stored(CHAIN[:4], rank=1), ranks=2)
    fleet.join("b")
    fleet.leave("a")
    fleet.say("b", removed(CHAIN[2:3]))
    assert fleet.row("b") == [0, 0, 0, 2]


def test_a_worker_that_is_back_in_the_same_life_says_all_of_it_again(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]))
    fleet.join("b")
    fleet.leave("a")
    fleet.join("a", stored(CHAIN[:1]))
    assert fleet.row("b") == [0, 0, 0, 1]


def test_a_worker_that_was_restarted_finds_what_it_stored_before(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]))
    fleet.leave("a")
    fleet.join("a", epoch=2)
    assert fleet.row("a") == [0, 0, 0, 4]


def test_a_worker_that_is_not_believed_says_nothing_of_the_store_either(fleet: Fleet) -> None:
    fleet.join("a", stored(CHAIN[:4]))
    fleet.join("b")
    fleet.index.demote("a", "its hits are not what it reports", fleet.now)
    fleet.index.check_integrity()
    assert fleet.row("b") == [0, 0, 0, 0]


def test_a_full_index_gives_up_what_the_dead_have_stored_before_it_doubts_the_living(
    make_identity: MakeIdentity,
) -> None:
    fleet = Fleet(make_identity, capacity=10)
    fleet.join("old", stored(CHAIN[:4]))
    fleet.leave("old")
    fleet.now = 1.0
    fleet.join("new", stored(CHAIN[:2]), store="another redis")
    fleet.leave("new")
    fleet.join("b")
    fleet.join("c", store="another redis")
    fleet.say("b", stored(CHAIN[4:8], DEVICE))
    assert (fleet.row("b"), fleet.row("c")) == ([0, 0, 0, 8], [0, 0, 0, 2])
    fleet.say("b", stored(CHAIN[8:10], DEVICE))
    assert (fleet.row("b"), fleet.row("c")) == ([0, 0, 0, 0], [0, 0, 0, 2])
    fleet.say("b", stored([*CHAIN[10:12], 7, 8], DEVICE))
    assert fleet.row("c") == [0, 0, 0, 0]
    assert fleet.index.state("b") is KvState.EXACT
    assert fleet.index.stats().blocks == 10


def test_of_many_that_left_only_the_last_are_remembered(fleet: Fleet) -> None:
    for number in range(40):
        fleet.join(f"w{number}", stored([1000 + number]))
        fleet.leave(f"w{number}")
    fleet.join("b")
    known = [number for number in range(40) if fleet.row("b", names=array("Q", [1000 + number]))[REMOTE]]
    assert known == list(range(24, 40))


@pytest.mark.parametrize(
    "log",
    [
        b"\x01\x03\x00",
        stored(CHAIN[:3])[:-1],
        stored(CHAIN[:3], DEVICE) + removed(CHAIN[:3])[:-8],
        record(KvEventKind.STORED, REMOTE, 1, 0, CHAIN),
        b"\x09\x03\x00\x00\x00\x00\x00\x00",
    ],
    ids=["half a header", "half a name", "a name too few", "a rank it does not have", "a kind there is not"],
)
def test_a_log_that_makes_no_sense_is_not_believed_where_a_store_is_shared(fleet: Fleet, log: bytes) -> None:
    fleet.join("a", stored(CHAIN[:2], DEVICE))
    fleet.say("a", log)
    status = fleet.index.status("a")
    assert status is not None
    assert status.state is KvState.PREDICTED
    assert status.reason.startswith("its log is malformed")


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(KvEventKind), st.sampled_from(Medium), st.lists(st.integers(0, 2**64 - 1), max_size=3)
    )
)


@given(RECORDS)
def test_every_record_of_a_log_goes_to_where_it_belongs_in_its_order(
    parts: list[tuple[KvEventKind, Medium, list[int]]],
) -> None:
    logs = [
        (kind, medium, record(kind, medium, 1, 5, array("Q", [] if kind is KvEventKind.CLEARED else names)))
        for kind, medium, names in parts
    ]
    own, remote, missing = split_log(b"".join(log for _, _, log in logs))
    assert own == b"".join(log for _, medium, log in logs if medium is not REMOTE)
    assert remote == b"".join(log for _, medium, log in logs if medium is REMOTE)
    assert missing == b"".join(
        log for kind, medium, log in logs if medium is REMOTE and kind is KvEventKind.REMOVED
    )


# -- against a naive model ---------------------------------------------------------------------------

DEPTH = 5
PATHS = [path for depth in range(1, DEPTH + 1) for path in itertools.product((0, 1), repeat=depth)]
NAME = {path: 0x9E3779B97F4A7C15 * (number + 1) % (1 << 64) for number, path in enumerate(PATHS)}
LEAVES = list(itertools.product((0, 1), repeat=DEPTH))

Path = tuple[int, ...]


@dataclass
class Model:
    """One worker: the paths that it holds by rank and medium."""

    store: str
    epoch: int
    ranks: int
    held: dict[tuple[int, Medium], set[Path]] = field(default_factory=dict)

    def remote(self) -> set[Path]:
        return {path for (_, medium), paths in self.held.items() if medium is REMOTE for path in paths}

    def log(self) -> bytes:
        return b"".join(
            stored([NAME[path]], medium, rank)
            for (rank, medium), paths in self.held.items()
            for path in paths
        )


class History:
    """Random changes to a fleet and to sets that say what it should find."""

    def __init__(self, make_identity: MakeIdentity, rng: Random) -> None:
        self.rng = rng
        self.fleet = Fleet(make_identity)
        self.workers: dict[str, Model] = {}
        self.kept: list[tuple[float, str, Model]] = []
        self.epochs = itertools.count(1)

    def run(self, steps: int) -> None:
        actions = [self.join, self.leave, self.lose, self.pass_time] + 8 * [self.change]
        for _ in range(steps):
            self.rng.choice(actions)()
            self.kept = [each for each in self.kept if each[0] > self.fleet.now]
            self.check(self.rng.choice(LEAVES))

    def join(self) -> None:
        worker_id = f"w{self.rng.randrange(4)}"
        if worker_id in self.workers:
            return
        known = Model(self.rng.choice(("", "x", "x", "y")), next(self.epochs), self.rng.choice((1, 1, 2)))
        left = [model for _, name, model in self.kept if name == worker_id]
        if left and self.rng.random() < 0.4:
            known = left[-1]
            self.kept = [each for each in self.kept if each[2] is not known]
        self.workers[worker_id] = known
        self.fleet.join(worker_id, known.log(), store=known.store, epoch=known.epoch, ranks=known.ranks)

    def leave(self) -> None:
        if self.workers:
            worker_id = self.rng.choice(sorted(self.workers))
            known = self.workers.pop(worker_id)
            self.fleet.leave(worker_id)
            if known.store:
                self.kept.append((self.fleet.now + KEEP_S, worker_id, known))

    def lose(self) -> None:
        """A batch is lost: the view is made anew from a snapshot."""
        if self.workers:
            worker_id = self.rng.choice(sorted(self.workers))
            self.fleet.sequences[worker_id] += 1
            self.fleet.say(worker_id, b"")
            status = self.fleet.index.status(worker_id)
            assert status is not None
            assert status.state is KvState.CATCHING_UP
            self.retry(worker_id)

    def retry(self, worker_id: str) -> None:
        known = self.workers[worker_id]
        for _ in range(100):
            self.fleet.catch_up(worker_id, known.log())
            if self.fleet.index.state(worker_id) is KvState.EXACT:
                return
            due = self.fleet.index.next_due()
            assert due is not None
            self.fleet.now = max(self.fleet.now, due)
        raise AssertionError("it is never exact again")

    def pass_time(self) -> None:
        self.fleet.pass_time(self.rng.choice((0.1, 10.0, KEEP_S)))

    def change(self) -> None:
        if not self.workers:
            return
        worker_id = self.rng.choice(sorted(self.workers))
        known = self.workers[worker_id]
        rank, medium = self.rng.randrange(known.ranks), self.rng.choice((DEVICE, DISK, REMOTE, REMOTE))
        held = known.held.setdefault((rank, medium), set())
        leaf, first = self.rng.choice(LEAVES), self.rng.randrange(DEPTH)
        paths = [leaf[: depth + 1] for depth in range(first, self.rng.randrange(first, DEPTH) + 1)]
        names = [NAME[path] for path in paths]
        if self.rng.random() < 0.65:
            held.update(paths)
            self.fleet.say(
                worker_id,
                record(KvEventKind.STORED, medium, rank, NAME.get(paths[0][:-1], 0), array("Q", names)),
            )
            return
        held.difference_update(paths)
        if medium is REMOTE:
            for _, _, dead in self.kept:
                if dead.store == known.store:
                    for where in dead.held:
                        if where[1] is REMOTE:
                            dead.held[where] -= set(paths)
        self.fleet.say(worker_id, removed(names, medium, rank))

    def check(self, leaf: Path) -> None:
        names = array("Q", [NAME[leaf[:depth]] for depth in range(1, DEPTH + 1)])
        everybody = [*self.workers.values(), *(model for _, _, model in self.kept)]
        for worker_id, known in self.workers.items():
            shared = {path for each in everybody if each.store == known.store for path in each.remote()}
            for rank in range(known.ranks):
                there: set[Path] = set()
                expected = []
                for medium in Medium:
                    there |= known.held.get((rank, medium), set())
                    if medium is REMOTE and known.store:
                        there |= shared
                    depth = 0
                    while depth < DEPTH and leaf[: depth + 1] in there:
                        depth += 1
                    expected.append(depth)
                assert self.fleet.row(worker_id, rank, names) == expected, (worker_id, rank, leaf)


def test_whatever_happens_each_finds_what_it_holds_and_what_its_store_holds(
    make_identity: MakeIdentity,
) -> None:
    for seed in range(200):
        try:
            History(make_identity, Random(seed)).run(60)
        except Exception as error:
            raise AssertionError(f"history {seed}: {error!r}") from error
