"""The contract of the tier store, with tiers whose calls the test completes one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.kit.kept_tier import SIZE, KeptTier, content

from kvasir.core.kv import KvEventKind, Medium, TierLoad
from kvasir.native._twin import records
from kvasir.ports.tier import TierBlock, TierChange, TierRead, TierWrite
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.eviction import eviction
from kvasir_workers.tiers.levels import LowerTierSettings
from kvasir_workers.tiers.store import TierStore

WAIT_S = 10.0


def block(number: int) -> TierBlock:
    """Block `number` of one chain."""
    return TierBlock(number.to_bytes(32, "big"), number, number - 1)


def chain(first: int, last: int) -> list[TierBlock]:
    return [block(number) for number in range(first, last + 1)]


class FakeTier(KeptTier):
    """A call waits until `gate` is open; blocks of `bad` come back as garbage."""

    def __init__(self, medium: Medium, kept: Iterable[TierBlock] = ()) -> None:
        super().__init__(medium, kept)
        self.bad: set[bytes] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.called = threading.Semaphore(0)
        self.read: list[bytes] = []
        self.written: list[bytes] = []
        self.closed = False

    def hang_in_get(self) -> tuple[threading.Event, threading.Event]:
        """Set when `get` is called, and to be set for it to go on."""
        entered, go_on = threading.Event(), threading.Event()
        plain = self.get

        def slow(wanted: Sequence[TierRead]) -> int:
            entered.set()
            assert go_on.wait(WAIT_S)
            return plain(wanted)

        self.get = slow  # type: ignore[method-assign]
        return entered, go_on

    def lookup(self, keys: Sequence[bytes]) -> int:
        self._wait()
        return super().lookup(keys)

    def get(self, wanted: Sequence[TierRead]) -> int:
        self._wait()
        whole = next((at for at, read in enumerate(wanted) if read.key in self.bad), len(wanted))
        self.read += [read.key for read in wanted[: whole + 1]]
        for read in wanted[whole:]:
            read.target[:] = b"\xff" * SIZE
        return super().get(wanted[:whole])

    def put(self, blocks: Sequence[TierWrite]) -> TierChange:
        self._wait()
        self.written += [write.block.key for write in blocks]
        return super().put(blocks)

    def close(self) -> None:
        self.closed = True

    def _wait(self) -> None:
        self.called.release()
        assert self.gate.wait(WAIT_S)


@dataclass
class Bench:
    """A store of `slots` slots over fake tiers, and a clock that the test moves."""

    tiers: tuple[FakeTier, ...] = ()
    slots: int = 16
    write_bytes: int = 1 << 20
    time: float = 0.0
    store: TierStore = field(init=False)
    memory: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.memory = bytearray(self.slots * SIZE)
        arena = Arena(self.slots, eviction("lru", self.slots))
        lower = [LowerTierSettings(tier, 0.01, 0.5, self.write_bytes) for tier in self.tiers]
        self.store = TierStore(arena, self.view, SIZE, lower, lambda: self.time)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * SIZE : (slot + 1) * SIZE]

    def until(self, true: Callable[[], bool]) -> None:
        """Return once it is true; a failure after WAIT_S."""
        for _ in range(int(WAIT_S / 0.01)):
            if true():
                return
            self.store.nap(0.01)
        pytest.fail("it never came true")

    def fetched(self, request_id: str) -> int:
        found: list[int] = []

        def there() -> bool:
            ready = self.store.ready(request_id)
            found.extend([] if ready is None else [ready])
            return ready is not None

        self.until(there)
        return found[0]

    def keep(self, blocks: Sequence[TierBlock], *, below: bool = True) -> None:
        """Store these as a worker would."""
        slots = self.store.reserve(blocks)
        for slot, each in zip(slots, blocks, strict=True):
            if slot is not None:
                self.view(slot)[:] = content(each.key)
        self.store.committed([slot for slot in slots if slot is not None], below=below)

    def holds(self, request_id: str, count: int, wanted: Sequence[TierBlock]) -> None:
        """The slots of a fetch hold the blocks' bytes."""
        slots = self.store.slots(request_id, 0, count)
        assert [bytes(self.view(slot)) for slot in slots] == [content(each.key) for each in wanted]


class Heard:
    """A router that applies every log."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.names: dict[Medium, set[int]] = {medium: set() for medium in Medium}

    def held(self) -> dict[Medium, set[int]]:
        """The names that are held after all that was said."""
        for log in self._bench.store.take_logs(1000):
            for entry in records(log):
                names = self.names[Medium(entry.medium)]
                if entry.kind is KvEventKind.STORED:
                    names.update(entry.names)
                elif entry.kind is KvEventKind.REMOVED:
                    names.difference_update(entry.names)
                else:
                    names.clear()
        return self.names


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(*tiers: FakeTier, slots: int = 16, write_bytes: int = 1 << 20) -> Bench:
        made.append(Bench(tiers, slots, write_bytes))
        return made[-1]

    yield build
    for bench in made:
        for tier in bench.tiers:
            tier.gate.set()
        bench.store.close()


Make = Callable[..., Bench]


def test_what_lies_in_the_arena_is_ready_at_once(make: Make) -> None:
    bench = make()
    bench.keep(chain(1, 3))
    bench.store.begin("r", chain(1, 5))
    assert bench.store.ready("r") == 3
    bench.holds("r", 3, chain(1, 3))


def test_a_fetch_that_is_stopped_has_what_is_in_the_arena_and_the_rest_gets_there_later(make: Make) -> None:
    remote = FakeTier(Medium.REMOTE, chain(2, 4))
    entered, go_on = remote.hang_in_get()
    bench = make(remote)
    bench.keep([block(1)], below=False)
    bench.store.begin("r", chain(1, 4))
    assert entered.wait(WAIT_S)
    assert bench.store.ready("r") is None
    assert bench.store.stop("r") == 1
    assert bench.store.ready("r") == 1
    bench.store.end("r")
    go_on.set()
    bench.until(lambda: bench.store.loads()[0].blocks == 4)
    bench.store.begin("again", chain(1, 4))
    assert bench.store.ready("again") == 4


def test_blocks_behind_a_gap_are_not_promised(make: Make) -> None:
    bench = make()
    bench.keep([block(1), block(3)])
    bench.store.begin("r", chain(1, 3))
    assert bench.store.ready("r") == 1


def test_what_the_arena_lacks_comes_from_the_first_tier_that_has_it(make: Make) -> None:
    disk, remote = FakeTier(Medium.DISK, chain(2, 3)), FakeTier(Medium.REMOTE, chain(1, 5))
    bench = make(disk, remote)
    bench.keep([block(1)], below=False)
    bench.store.begin("r", chain(1, 6))
    assert bench.fetched("r") == 5
    bench.holds("r", 5, chain(1, 5))
    assert disk.read == [each.key for each in chain(2, 3)]
    assert remote.read == [each.key for each in chain(4, 5)]


def test_a_hit_is_written_to_faster_tiers_and_not_back(make: Make) -> None:
    disk, remote = FakeTier(Medium.DISK, [block(1)]), FakeTier(Medium.REMOTE, chain(1, 2))
    bench = make(disk, remote)
    bench.store.begin("r", chain(1, 2))
    assert bench.fetched("r") == 2
    bench.until(lambda: disk.written == [block(2).key])
    assert remote.written == []


def test_computed_blocks_are_written_to_every_tier(make: Make) -> None:
    disk, remote = FakeTier(Medium.DISK), FakeTier(Medium.REMOTE)
    bench = make(disk, remote)
    bench.keep(chain(1, 4))
    bench.until(lambda: len(disk.written) == 4 and len(remote.written) == 4)


def test_blocks_that_are_for_the_arena_alone_are_written_nowhere(make: Make) -> None:
    disk = FakeTier(Medium.DISK)
    bench = make(disk)
    bench.keep(chain(1, 2), below=False)
    bench.keep(chain(3, 3))
    bench.until(lambda: disk.written == [block(3).key])


def test_a_block_that_does_not_verify_is_never_promised_and_the_next_tier_is_asked(make: Make) -> None:
    disk, remote = FakeTier(Medium.DISK, chain(1, 3)), FakeTier(Medium.REMOTE, chain(1, 2))
    disk.bad = {block(2).key}
    bench = make(disk, remote)
    bench.store.begin("r", chain(1, 3))
    assert bench.fetched("r") == 2
    bench.holds("r", 2, chain(1, 2))
    assert remote.read == [block(2).key]


def test_a_question_that_hangs_is_a_miss_after_its_deadline(make: Make) -> None:
    remote = FakeTier(Medium.REMOTE, chain(1, 3))
    remote.gate.clear()
    bench = make(remote)
    bench.store.begin("r", chain(1, 3))
    assert remote.called.acquire(timeout=WAIT_S)
    assert bench.store.ready("r") is None
    bench.time += 0.02
    assert bench.store.ready("r") == 0


def test_a_read_that_hangs_leaves_what_came_before_it(make: Make) -> None:
    remote = FakeTier(Medium.REMOTE, chain(2, 3))
    bench = make(remote)
    bench.keep([block(1)], below=False)
    entered, go_on = remote.hang_in_get()
    bench.store.begin("r", chain(1, 3))
    assert entered.wait(WAIT_S)
    bench.time += 0.4
    assert bench.store.ready("r") is None
    bench.time += 0.2
    assert bench.store.ready("r") == 1
    go_on.set()


def test_a_tier_whose_call_does_not_return_is_passed_by_and_said_to_be_in_trouble(make: Make) -> None:
    disk, remote = FakeTier(Medium.DISK, chain(1, 2)), FakeTier(Medium.REMOTE, chain(1, 2))
    bench = make(disk, remote)
    disk.gate.clear()
    bench.store.begin("first", chain(1, 2))
    assert disk.called.acquire(timeout=WAIT_S)
    bench.time += 5.0
    assert bench.store.ready("first") == 0
    bench.store.begin("second", chain(1, 2))
    assert bench.fetched("second") == 2
    assert "not returned" in {load.medium: load.trouble for load in bench.store.loads()}[Medium.DISK]
    disk.gate.set()
    bench.until(lambda: not {load.medium: load.trouble for load in bench.store.loads()}[Medium.DISK])


def test_a_slot_is_not_given_away_while_a_late_call_may_write_to_it(make: Make) -> None:
    remote = FakeTier(Medium.REMOTE, chain(1, 2))
    bench = make(remote, slots=2)
    entered, go_on = remote.hang_in_get()
    bench.store.begin("r", chain(1, 2))
    assert entered.wait(WAIT_S)
    bench.store.end("r")
    assert bench.store.reserve(chain(8, 9)) == [None, None]
    go_on.set()
    bench.store.begin("again", chain(1, 2))
    assert bench.fetched("again") == 2
    bench.holds("again", 2, chain(1, 2))
    bench.store.end("again")
    assert None not in bench.store.reserve(chain(8, 9))


def test_two_requests_share_one_read(make: Make) -> None:
    remote = FakeTier(Medium.REMOTE, chain(1, 4))
    bench = make(remote)
    remote.gate.clear()
    bench.store.begin("a", chain(1, 4))
    bench.store.begin("b", chain(1, 4))
    remote.gate.set()
    assert bench.fetched("a") == bench.fetched("b") == 4
    assert len(remote.read) == 4


def test_who_waits_for_another_request_s_read_that_fails_asks_itself(make: Make) -> None:
    disk, remote = FakeTier(Medium.DISK, chain(1, 2)), FakeTier(Medium.REMOTE, chain(1, 2))
    disk.bad = {block(1).key}
    bench = make(disk, remote)
    bench.store.begin("a", chain(1, 2))
    bench.store.begin("b", chain(1, 2))
    assert bench.fetched("a") == bench.fetched("b") == 2


def test_a_fetch_waits_for_blocks_that_the_device_is_about_to_give(make: Make) -> None:
    bench = make()
    slots = bench.store.reserve(chain(1, 2))
    bench.store.begin("r", chain(1, 2))
    bench.time += 1000.0
    assert bench.store.ready("r") is None
    bench.store.committed([slot for slot in slots if slot is not None])
    assert bench.store.ready("r") == 2


def test_fetched_blocks_stay_until_the_request_lets_go(make: Make) -> None:
    bench = make(slots=2)
    bench.keep(chain(1, 2))
    bench.store.begin("r", chain(1, 2))
    assert bench.store.reserve(chain(5, 6)) == [None, None]
    bench.store.end("r")
    bench.store.end("r")
    assert None not in bench.store.reserve(chain(5, 6))


def test_a_fetch_that_finds_no_room_keeps_what_it_has(make: Make) -> None:
    remote = FakeTier(Medium.REMOTE, chain(1, 3))
    bench = make(remote, slots=2)
    bench.store.begin("r", chain(1, 3))
    assert bench.fetched("r") == 2


def test_blocks_behind_one_without_room_are_not_stored(make: Make) -> None:
    bench = make(slots=1)
    assert bench.store.reserve(chain(1, 3)) == [0, None, None]
    assert bench.store.loads()[0].dropped_blocks == 2


def test_a_tier_that_is_slow_to_write_costs_blocks_and_no_more_than_a_quarter_of_the_arena(
    make: Make,
) -> None:
    disk = FakeTier(Medium.DISK)
    bench = make(disk, slots=16)
    disk.gate.clear()
    bench.keep(chain(1, 1))
    assert disk.called.acquire(timeout=WAIT_S)
    bench.keep(chain(2, 9))
    load = bench.store.loads()[1]
    assert load.dropped_blocks == 4
    disk.gate.set()
    bench.until(lambda: len(disk.written) == 5)


def test_routers_are_told_what_every_tier_holds(make: Make) -> None:
    disk = FakeTier(Medium.DISK)
    bench = make(disk)
    heard = Heard(bench)
    bench.keep(chain(1, 4))
    bench.until(lambda: heard.held()[Medium.DISK] == {1, 2, 3, 4})
    bench.keep(chain(11, 24), below=False)
    held = heard.held()[Medium.CPU]
    assert len(held) == 16
    assert held >= set(range(11, 25))
    bench.store.announce()
    afresh = Heard(bench)
    bench.until(lambda: afresh.held()[Medium.DISK] == {1, 2, 3, 4})
    assert afresh.held()[Medium.CPU] == held


def test_what_is_announced_begins_with_nothing(make: Make) -> None:
    bench = make()
    heard = Heard(bench)
    heard.names[Medium.REMOTE] = {99}
    bench.store.announce()
    assert not heard.held()[Medium.REMOTE]


def test_nothing_is_left_to_tell_once_all_is_written_and_told(make: Make) -> None:
    disk = FakeTier(Medium.DISK)
    bench = make(disk)
    bench.keep(chain(1, 4))
    assert bench.store.unsettled

    def settled() -> bool:
        bench.store.take_logs(10)
        return not bench.store.unsettled

    bench.until(settled)
    assert len(disk.written) == 4


def test_counters_say_what_was_stored_and_loaded(make: Make) -> None:
    bench = make(slots=4)
    bench.keep(chain(1, 3))
    bench.store.loaded(2, 0.25)
    bench.store.loaded(1, 0.25)
    cpu = bench.store.loads()[0]
    assert cpu == replace(
        TierLoad(Medium.CPU),
        blocks=3,
        bytes_used=24,
        bytes_capacity=32,
        loads=2,
        loaded_blocks=3,
        loaded_bytes=24,
        load_s=0.5,
        stored_blocks=3,
        stored_bytes=24,
    )


def test_closing_writes_what_waits_and_closes_tiers(make: Make) -> None:
    disk = FakeTier(Medium.DISK)
    bench = make(disk)
    bench.keep(chain(1, 4))
    bench.store.close()
    assert len(disk.written) == 4
    assert disk.closed
