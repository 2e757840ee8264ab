"""The tier store under any order of events, of requests and of tiers that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.kit.kept_tier import SIZE, KeptTier, content

from kvasir.core.kv import Medium
from kvasir.ports.tier import TierBlock, TierRead
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.eviction import eviction
from kvasir_workers.tiers.levels import LowerTierSettings
from kvasir_workers.tiers.store import TierStore
from kvasir_workers.tiers.threads import Job, Tend, TierThread, Urgency

SLOTS = 6
CHAINS = 3
LENGTH = 4


def chain(number: int) -> list[TierBlock]:
    """One of CHAINS chains, which share their first block."""
    names = [1, *(10 * (number + 1) + at for at in range(1, LENGTH))]
    return [
        TierBlock(name.to_bytes(32, "big"), name, names[at - 1] if at else 0) for at, name in enumerate(names)
    ]


class ManualLane(TierThread):
    """Runs a job when it is told to."""

    def __init__(self, name: str, now: Callable[[], float], maintain: Tend) -> None:
        self.waiting: list[tuple[Urgency, Job]] = []
        self.hangs = False

    def add(self, urgency: Urgency, job: Job) -> bool:
        self.waiting.append((urgency, job))
        return True

    def stuck(self, seconds: float) -> bool:
        return self.hangs

    @property
    def tended(self) -> bool:
        return True

    def close(self, drain_s: float) -> bool:
        return True

    def run_one(self) -> None:
        if self.waiting:
            first = min(range(len(self.waiting)), key=lambda at: self.waiting[at][0])
            self.waiting.pop(first)[1]()


class Tier(KeptTier):
    """Gives back `sound` of the blocks that it is asked for."""

    def __init__(self, medium: Medium, kept: Iterable[TierBlock]) -> None:
        super().__init__(medium, kept)
        self.sound = LENGTH
        self.during_call: Callable[[], None] = lambda: None

    def lookup(self, keys: Sequence[bytes]) -> int:
        self.during_call()
        return super().lookup(keys)

    def get(self, wanted: Sequence[TierRead]) -> int:
        self.during_call()
        for read in wanted[self.sound :]:
            read.target[:] = b"\xee" * SIZE
        return super().get(wanted[: self.sound])


class Histories(RuleBasedStateMachine):
    """Requests come and go, the device stores, lanes run, hang and find garbage, time passes."""

    fetches: Bundle[str] = Bundle("fetches")
    stores: Bundle[list[int]] = Bundle("stores")

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.memory = bytearray(SLOTS * SIZE)
        self.arena = Arena(SLOTS, eviction("s3fifo", SLOTS))
        media = (Medium.DISK, Medium.REMOTE)
        self.tiers = [Tier(medium, [*chain(at), *chain(2)]) for at, medium in enumerate(media)]
        self.lanes: list[ManualLane] = []
        lower = [LowerTierSettings(tier, 0.01, 0.5, 1 << 20) for tier in self.tiers]
        self.store = TierStore(
            self.arena, self.view, SIZE, lower, lambda: self.time, make_lane=self.make_lane
        )
        self.wanted: dict[str, list[TierBlock]] = {}
        self.filling: list[list[int]] = []
        self.names = 0

    def make_lane(self, name: str, now: Callable[[], float], maintain: Tend) -> TierThread:
        self.lanes.append(ManualLane(name, now, maintain))
        return self.lanes[-1]

    def view(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * SIZE : (slot + 1) * SIZE]

    @rule(target=fetches, number=st.integers(0, CHAINS - 1), length=st.integers(0, LENGTH))
    def begin(self, number: int, length: int) -> str:
        self.names += 1
        name = f"r{self.names}"
        self.wanted[name] = chain(number)[:length]
        self.store.begin(name, self.wanted[name])
        return name

    @rule(name=fetches, waits=st.booleans())
    def ask(self, name: str, waits: bool) -> None:
        if name not in self.wanted:
            return
        ready = self.store.ready(name) if waits else self.store.stop(name)
        if ready is None:
            return
        for slot, block in zip(self.store.slots(name, 0, ready), self.wanted[name], strict=False):
            assert bytes(self.view(slot)) == content(block.key)

    @rule(name=consumes(fetches))
    def end(self, name: str) -> None:
        self.wanted.pop(name, None)
        self.store.end(name)

    @rule(target=stores, number=st.integers(0, CHAINS - 1))
    def compute(self, number: int) -> list[int]:
        slots = [slot for slot in self.store.reserve(chain(number)) if slot is not None]
        self.filling.append(slots)
        return slots

    @rule(slots=consumes(stores), below=st.booleans())
    def computed(self, slots: list[int], below: bool) -> None:
        for slot in slots:
            self.view(slot)[:] = content(self.arena.block(slot).key)
        self.filling.remove(slots)
        self.store.committed(slots, below=below)

    @rule(lane=st.integers(0, 1), sound=st.integers(0, LENGTH))
    def run(self, lane: int, sound: int) -> None:
        self.tiers[lane].sound = sound
        self.lanes[lane].run_one()

    @rule(lane=st.integers(0, 1))
    def run_while_all_requests_end(self, lane: int) -> None:
        def end() -> None:
            for name in self.wanted:
                self.store.end(name)
            self.wanted.clear()

        self.tiers[lane].during_call = end
        self.lanes[lane].run_one()
        self.tiers[lane].during_call = lambda: None

    @rule(lane=st.integers(0, 1), hangs=st.booleans())
    def hang(self, lane: int, hangs: bool) -> None:
        self.lanes[lane].hangs = hangs

    @rule(lane=st.integers(0, 1), number=st.integers(0, CHAINS - 1))
    def lose(self, lane: int, number: int) -> None:
        for block in chain(number):
            self.tiers[lane].kept.pop(block.key, None)

    @rule(lane=st.integers(0, 1), number=st.integers(0, CHAINS - 1), length=st.integers(1, LENGTH))
    def another_worker_stores(self, lane: int, number: int, length: int) -> None:
        self.tiers[lane].kept.update((block.key, block) for block in chain(number)[:length])

    @rule(seconds=st.sampled_from([0.005, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.time += seconds

    @invariant()
    def what_can_be_found_is_sound(self) -> None:
        for block in self.arena.blocks():
            slot = self.arena.find(block.key)
            assert slot is not None
            assert bytes(self.view(slot)) == content(block.key)

    def teardown(self) -> None:
        """Once all requests have ended and all jobs are done nothing is pinned, filling or waiting."""
        for slots in self.filling:
            for slot in slots:
                self.view(slot)[:] = content(self.arena.block(slot).key)
            self.store.committed(slots)
        for name in self.wanted:
            self.store.end(name)
        for lane in self.lanes:
            lane.hangs = False
        for _ in range(1000):
            for lane in self.lanes:
                lane.run_one()
        assert not any(lane.waiting for lane in self.lanes)
        assert not self.store.fetching
        self.store.take_logs(1000)
        assert not self.store.unsettled
        others = [TierBlock(bytes([number]) * 32, 100 + number, 0) for number in range(SLOTS)]
        assert None not in self.store.reserve(others)


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=40, deadline=None)


def test_every_fetch_ends_once_its_time_is_up() -> None:
    history = Histories()
    history.store.begin("r", chain(0))
    for _ in range(3):
        history.time += 1.0
        ready = history.store.ready("r")
    assert ready == 0
