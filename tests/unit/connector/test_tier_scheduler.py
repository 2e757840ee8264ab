"""The connector's tier code: storing and loading blocks, with a dict as the device."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from tests.kit.kept_tier import KeptTier

from kvasir.config.spec.tiers import TiersSpec
from kvasir.core.kv import KvEventKind, Medium
from kvasir.core.media.prompts import PromptMedia
from kvasir.native import chain_hashes, root_hash
from kvasir.native._twin import records
from kvasir.native.salt_places import prompt_names
from kvasir.ports.tier import KvTier, TierBlock, TierRead
from kvasir_workers.connector import stats
from kvasir_workers.connector.request_blocks import RequestProgress
from kvasir_workers.connector.tiers.orders import ArenaParts, TierOrders, TierReport
from kvasir_workers.connector.tiers.pace import PrefillPace
from kvasir_workers.connector.tiers.scheduler import TierScheduler
from kvasir_workers.connector.tiers.worker import TierWorker
from kvasir_workers.tiers.arena import Arena
from kvasir_workers.tiers.copier import Copied
from kvasir_workers.tiers.eviction import eviction
from kvasir_workers.tiers.levels import LowerTierSettings
from kvasir_workers.tiers.store import TierStore

SIZE = 4
RANKS = 2


@dataclass
class Request:
    """The part of vLLM's request that is read. Keys are chained hashes of the tokens."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        keys: list[bytes] = []
        for end in range(SIZE, self.num_tokens + 1, SIZE):
            above = keys[-1] if keys else f"{self.cache_salt} {self.lora_request}".encode()
            tokens = bytes(self.all_token_ids[end - SIZE : end])
            keys.append(hashlib.sha256(above + tokens).digest())
        return keys


class DictCopier:
    """One rank: blocks and slots are entries of dicts. Copies end when the test says so."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.fences = 0
        self.held_back = False
        self._tickets = 0
        self._ended: list[Copied] = []

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        self.slots.update((slot, self.blocks[block]) for block, slot in zip(blocks, slots, strict=True))
        return self._end()

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        self.blocks.update((block, self.slots[slot]) for block, slot in zip(blocks, slots, strict=True))
        return self._end()

    def fence(self) -> None:
        self.fences += 1

    def poll(self) -> list[Copied]:
        if self.held_back:
            return []
        ended, self._ended = self._ended, []
        return ended

    def _end(self) -> int:
        self._tickets += 1
        self._ended.append(Copied(self._tickets, 0.25))
        return self._tickets


@dataclass
class Engine:
    """Both halves around a device, as vLLM calls them. A block's content is its key."""

    slots: int = 32
    write_back: Literal["prompts", "all"] = "all"
    time: float = 0.0
    on_device: set[bytes] = field(default_factory=set)
    window: int | None = None
    lower: Sequence[KvTier] = ()

    def __post_init__(self) -> None:
        self.memory = bytearray(8 * self.slots)
        self.store = TierStore(
            Arena(self.slots, eviction("lru", self.slots)),
            lambda slot: memoryview(self.memory)[8 * slot : 8 * slot + 8],
            8,
            [LowerTierSettings(tier, 1e6, 1e6, 1 << 20) for tier in self.lower],
            lambda: self.time,
        )
        self.side = TierScheduler(
            self.store,
            ArenaParts(self.slots, tuple(range(RANKS)), None),
            TiersSpec(write_back=self.write_back),
            model="m",
            block_size=SIZE,
            window=self.window,
            on_device=self.on_device.__contains__,
            now=lambda: self.time,
        )
        self.copiers = [DictCopier() for _ in range(RANKS)]
        self.naps: list[float] = []
        self.workers = [TierWorker(lambda _, c=each: c, pause=self.naps.append) for each in self.copiers]  # type: ignore[misc]
        # vLLM's block 0 stands for no block.
        self._block = 1

    def take_blocks(self, count: int) -> list[int]:
        """Blocks of the device that nobody has had."""
        first, self._block = self._block, self._block + count
        return list(range(first, self._block))

    def step(
        self, *progress: RequestProgress, preempted: Iterable[str] = (), fill: dict[int, bytes] | None = None
    ) -> set[str]:
        """One engine step, whose forward writes `fill`; the requests whose loads ended."""
        orders = self.side.take_orders(progress, preempted, idle=not progress) or TierOrders()
        report = TierReport()
        ended: list[set[str]] = []
        for worker, copier in zip(self.workers, self.copiers, strict=True):
            worker.before_forward(orders)
            copier.blocks.update(fill or {})
            worker.load(orders)
            worker.after_forward(orders)
            ended.append(worker.poll(idle=not progress))
            report.merge(worker.take_report())
        received = set.intersection(*ended)
        assert self.side.update(report, received) == received
        return received

    def compute(self, request: Request, blocks: list[int], before: int, after: int) -> None:
        """A step that computes these tokens of a request."""
        keys = request.block_hashes[: after // SIZE]
        fill = {block: key for block, key in zip(blocks, keys, strict=False) if key in keys[before // SIZE :]}
        self.step(RequestProgress(request.request_id, before, after, lambda _: (blocks,)), fill=fill)

    def admit(self, request: Request, local: int = 0) -> tuple[int, list[int]]:
        """Have a request scheduled, and loaded what there is: how many tokens, and into which blocks."""
        found = self.side.matched_tokens(request, local)
        assert found is not None
        blocks = self.take_blocks(-(-request.num_tokens // SIZE))
        assert self.side.allocated(request, blocks, found) is (found > 0)
        if found:
            assert self.step() == {request.request_id}
            assert not self.side.allocated(request, blocks, 0)
        return found, blocks

    def serve(self, request: Request) -> int:
        """A whole prompt in one step; how many tokens were loaded."""
        self.side.arrived(request)
        found, blocks = self.admit(request)
        self.compute(request, blocks, found, request.num_tokens)
        self.side.finished(request)
        return found

    def counts(self) -> dict[str, Any]:
        self.time += 1.0
        return self.side.take_stats() or {}


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Engine] = []

    def build(
        slots: int = 32,
        write_back: Literal["prompts", "all"] = "all",
        window: int | None = None,
        lower: Sequence[KvTier] = (),
    ) -> Engine:
        made.append(Engine(slots, write_back, window=window, lower=lower))
        return made[-1]

    yield build
    for engine in made:
        engine.side.close()


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + at) % 250 for at in range(length)]


@pytest.mark.parametrize(("length", "loaded"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (17, 16)])
def test_a_prompt_comes_back_but_for_its_last_token(make: Make, length: int, loaded: int) -> None:
    engine = make()
    assert engine.serve(Request("first", prompt(length))) == 0
    again = Request("again", prompt(length))
    engine.side.arrived(again)
    found, blocks = engine.admit(again)
    assert found == loaded
    for copier in engine.copiers:
        assert [copier.blocks[b] for b in blocks[: loaded // SIZE]] == again.block_hashes[: loaded // SIZE]


def test_only_what_the_device_lacks_is_loaded(make: Make) -> None:
    engine = make()
    engine.serve(Request("first", prompt(17)))
    again = Request("again", prompt(17))
    engine.side.arrived(again)
    assert engine.side.matched_tokens(again, 8) == 8
    blocks = engine.take_blocks(5)
    assert engine.side.allocated(again, blocks, 8)
    engine.step()
    assert [engine.copiers[0].blocks.get(b) for b in blocks] == [None, None, *again.block_hashes[2:4], None]


def test_another_salt_or_adapter_finds_nothing(make: Make) -> None:
    engine = make()
    engine.serve(Request("first", prompt(17)))
    assert engine.serve(Request("salted", prompt(17), cache_salt="s")) == 0
    assert engine.serve(Request("adapted", prompt(17), lora_request=SimpleNamespace(lora_name="a"))) == 0
    assert engine.serve(Request("same", prompt(17))) == 16


def test_prompts_with_one_name_share_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_name(tokens: Any, block_size: int, root: int) -> array[int]:
        return array("Q", [7] * (len(tokens) // block_size))

    monkeypatch.setattr("kvasir_workers.connector.tiers.scheduler.chain_hashes", one_name)
    engine = make()
    engine.serve(Request("first", prompt(17)))
    assert engine.serve(Request("other", prompt(17, first=99))) == 0


def test_generated_blocks_are_kept_as_they_become_full(make: Make) -> None:
    engine = make()
    request = Request("first", prompt(6))
    engine.side.arrived(request)
    _, blocks = engine.admit(request)
    engine.compute(request, blocks, 0, 6)
    for token in range(6):
        request.all_token_ids.append(200 + token)
        blocks += engine.take_blocks(1)
        engine.compute(request, blocks, request.num_tokens - 1, request.num_tokens)
    engine.side.finished(request)
    assert engine.serve(Request("again", [*request.all_token_ids, 1])) == 12


def test_generated_blocks_are_not_kept_where_prompts_alone_are(make: Make) -> None:
    engine = make(write_back="prompts")
    request = Request("first", prompt(12), num_prompt_tokens=6)
    engine.side.arrived(request)
    _, blocks = engine.admit(request)
    engine.compute(request, blocks, 0, 12)
    engine.side.finished(request)
    assert engine.serve(Request("again", prompt(13))) == 4


def test_a_block_whose_last_token_is_not_known_yet_is_kept_with_the_next_step(make: Make) -> None:
    """Asynchronous scheduling runs ahead of the tokens."""
    engine = make()
    request = Request("first", prompt(7))
    engine.side.arrived(request)
    _, blocks = engine.admit(request)
    engine.compute(request, blocks, 0, 7)
    engine.step(RequestProgress("first", 7, 8, lambda _: (blocks,)))
    request.all_token_ids.append(99)
    key = request.block_hashes[1]
    engine.step(RequestProgress("first", 8, 9, lambda _: (blocks,)), fill={blocks[1]: key})
    engine.side.finished(request)
    assert engine.serve(Request("again", [*request.all_token_ids, 1])) == 8


def test_what_came_from_another_worker_is_not_written_back(make: Make) -> None:
    engine = make()
    request = Request("pulled", prompt(18))
    engine.side.arrived(request)
    blocks = engine.take_blocks(5)
    assert not engine.side.allocated(request, blocks, 0)
    engine.step(RequestProgress("pulled", 17, 18, lambda _: (blocks,)))
    engine.side.finished(request)
    assert engine.serve(Request("again", prompt(18))) == 0


def test_requests_that_want_no_tiers_leave_none(make: Make) -> None:
    engine = make()
    engine.serve(Request("warm-up", prompt(17), kv_transfer_params={"tiers": False}))
    assert engine.serve(Request("again", prompt(17))) == 0


def test_who_must_not_read_the_cache_loads_nothing(make: Make) -> None:
    engine = make()
    engine.serve(Request("first", prompt(17)))
    assert engine.serve(Request("again", prompt(17), skip_reading_prefix_cache=True)) == 0


def test_a_hint_pins_what_is_there_before_the_engine_asks(make: Make) -> None:
    engine = make(slots=4)
    engine.serve(Request("first", prompt(17)))
    waiting = Request("again", prompt(17), kv_transfer_params={"tier_tokens": 16})
    engine.side.arrived(waiting)
    engine.serve(Request("other", prompt(17, first=100)))
    found, _ = engine.admit(waiting)
    assert found == 16


def test_without_a_hint_what_waits_may_give_way(make: Make) -> None:
    engine = make(slots=4)
    engine.serve(Request("first", prompt(17)))
    waiting = Request("again", prompt(17))
    engine.side.arrived(waiting)
    engine.serve(Request("other", prompt(17, first=100)))
    assert engine.admit(waiting)[0] == 0


def test_a_hinted_fetch_begins_behind_what_the_device_has_and_begins_anew_when_that_is_gone(
    make: Make,
) -> None:
    engine = make()
    first = Request("first", prompt(17))
    engine.serve(first)
    engine.on_device.update(first.block_hashes[:2])
    waiting = Request("again", prompt(17), kv_transfer_params={"tier_tokens": 8})
    engine.side.arrived(waiting)
    assert engine.side.matched_tokens(waiting, 8) == 8
    assert engine.side.matched_tokens(waiting, 4) == 12
    blocks = engine.take_blocks(5)
    assert engine.side.allocated(waiting, blocks, 12)
    engine.step()
    assert [engine.copiers[0].blocks[b] for b in blocks[1:4]] == waiting.block_hashes[1:4]


def test_what_was_promised_stays_until_the_request_is_scheduled_or_gone(make: Make) -> None:
    engine = make(slots=4)
    engine.serve(Request("first", prompt(17)))
    waiting = Request("again", prompt(17))
    engine.side.arrived(waiting)
    assert engine.side.matched_tokens(waiting, 0) == 16
    engine.serve(Request("other", prompt(17, first=100)))
    assert engine.side.matched_tokens(waiting, 0) == 16
    engine.side.finished(waiting)
    engine.serve(Request("next", prompt(17, first=100)))
    assert engine.serve(Request("once more", prompt(17))) == 0


def test_a_request_that_ends_while_it_is_loaded_lets_go_when_the_load_has_ended(make: Make) -> None:
    engine = make(slots=4)
    engine.serve(Request("first", prompt(17)))
    gone = Request("gone", prompt(17))
    engine.side.arrived(gone)
    assert engine.side.matched_tokens(gone, 0) == 16
    assert engine.side.allocated(gone, engine.take_blocks(5), 16)
    for copier in engine.copiers:
        copier.held_back = True
    assert engine.step() == set()
    engine.side.finished(gone)
    assert engine.store.reserve([TierBlock(b"x" * 32, 1, 0)]) == [None]
    for copier in engine.copiers:
        copier.held_back = False
    assert engine.step() == {"gone"}
    assert engine.store.reserve([TierBlock(b"x" * 32, 1, 0)]) != [None]


def test_an_idle_rank_naps_while_it_loads(make: Make) -> None:
    engine = make()
    engine.serve(Request("first", prompt(17)))
    again = Request("again", prompt(17))
    engine.side.arrived(again)
    engine.side.allocated(again, engine.take_blocks(5), engine.side.matched_tokens(again, 0) or 0)
    engine.copiers[0].held_back = True
    engine.naps.clear()
    engine.step()
    assert engine.naps


def preempt(engine: Engine, request: Request, blocks: list[int]) -> None:
    """Others overwrite a request's blocks in the step that preempts it."""
    request.num_preemptions += 1
    engine.step(preempted=[request.request_id], fill=dict.fromkeys(blocks, b"other"))


def running(engine: Engine, length: int = 18) -> tuple[Request, list[int]]:
    request = Request("running", prompt(length))
    engine.side.arrived(request)
    _, blocks = engine.admit(request)
    engine.compute(request, blocks, 0, length)
    request.all_token_ids.append(1)
    return request, blocks


def test_a_preempted_request_is_swapped_in(make: Make) -> None:
    engine = make()
    request, blocks = running(engine)
    preempt(engine, request, blocks)
    found, there = engine.admit(request)
    assert found == 16
    assert [engine.copiers[1].blocks[b] for b in there[:4]] == request.block_hashes[:4]
    assert engine.counts()[stats.SWAPPED_IN] == 1
    assert engine.side.finished(request) is None


def test_what_a_preempted_request_held_stays_in_the_arena_until_it_is_back(make: Make) -> None:
    engine = make(slots=6)
    request, blocks = running(engine)
    preempt(engine, request, blocks)
    for first in (60, 120, 180):
        engine.serve(Request(f"other {first}", prompt(17, first=first)))
    assert engine.admit(request)[0] == 16


def test_what_the_arena_lost_of_a_preempted_request_is_saved_before_it_is_overwritten(make: Make) -> None:
    engine = make(slots=5)
    request, blocks = running(engine)
    engine.serve(Request("other", prompt(21, first=100)))
    preempt(engine, request, blocks)
    found, there = engine.admit(request)
    assert found == 16
    assert [engine.copiers[0].blocks[b] for b in there[:4]] == request.block_hashes[:4]


def test_what_a_window_has_left_behind_is_not_loaded(make: Make) -> None:
    engine = make(window=6)
    engine.serve(Request("first", prompt(17)))
    again = Request("again", prompt(17))
    engine.side.arrived(again)
    assert engine.side.matched_tokens(again, 0) == 16
    blocks = [0, 0, *engine.take_blocks(3)]
    assert engine.side.allocated(again, blocks, 16)
    engine.step()
    assert [engine.copiers[0].blocks.get(b) for b in blocks[2:4]] == again.block_hashes[2:4]
    assert 0 not in engine.copiers[0].blocks


def test_blocks_that_a_window_may_have_freed_are_not_saved_at_a_preemption(make: Make) -> None:
    engine = make(slots=5, window=14)
    request, blocks = running(engine)
    engine.serve(Request("other", prompt(21, first=100)))
    # Another request has got the block that the window left behind.
    for copier in engine.copiers:
        copier.blocks[blocks[0]] = b"another's"
    preempt(engine, request, blocks)
    assert engine.admit(request)[0] == 0
    assert all(b"another's" not in copier.slots.values() for copier in engine.copiers)


def test_a_preempted_request_without_room_in_the_arena_is_computed_again(make: Make) -> None:
    engine = make(slots=4)
    request, blocks = running(engine)
    engine.serve(Request("other", prompt(17, first=100)))
    pinning = Request("pinning", prompt(17, first=100))
    engine.side.arrived(pinning)
    assert engine.side.matched_tokens(pinning, 0) == 16
    preempt(engine, request, blocks)
    assert engine.admit(request)[0] == 0
    counts = engine.counts()
    assert (counts[stats.SWAPPED_IN], counts[stats.RECOMPUTED]) == (0, 1)


def test_a_preempted_request_waits_until_its_blocks_are_saved(make: Make) -> None:
    engine = make(slots=5)
    request, blocks = running(engine)
    engine.serve(Request("other", prompt(21, first=100)))
    engine.copiers[1].held_back = True
    preempt(engine, request, blocks)
    assert engine.side.matched_tokens(request, 0) is None
    assert engine.side.has_pending_work()
    engine.copiers[1].held_back = False
    engine.step()
    assert engine.side.matched_tokens(request, 0) == 16


def test_the_output_says_what_came_from_tiers_and_how_long_it_took(make: Make) -> None:
    engine = make()
    engine.serve(Request("first", prompt(17)))
    again = Request("again", prompt(17))
    engine.side.arrived(again)
    engine.side.allocated(again, engine.take_blocks(5), engine.side.matched_tokens(again, 0) or 0)
    engine.time += 0.5
    engine.step()
    assert engine.side.finished(again) == {"tier_tokens": 16, "tier_s": 0.5}
    assert engine.side.finished(again) is None


class SlowTier(KeptTier):
    """Has every block, and reads none before `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(Medium.REMOTE)
        self.go_on = threading.Event()

    def lookup(self, keys: Sequence[bytes]) -> int:
        return len(keys)

    def get(self, wanted: Sequence[TierRead]) -> int:
        assert self.go_on.wait(10.0)
        return super().get(wanted)


@pytest.fixture
def slow() -> Iterator[SlowTier]:
    tier = SlowTier()
    yield tier
    tier.go_on.set()


def computed(engine: Engine, request: Request, seconds: float) -> None:
    """A request whose prompt is computed in that time."""
    engine.side.arrived(request)
    blocks = engine.take_blocks(-(-request.num_tokens // SIZE))
    engine.compute(request, blocks, 0, request.num_tokens)
    engine.time += seconds
    request.all_token_ids.append(0)
    engine.side.finished(request)


def test_a_prompt_waits_for_a_slow_tier_as_long_as_it_would_take_to_compute(
    make: Make, slow: SlowTier
) -> None:
    engine = make(lower=[slow])
    computed(engine, Request("first", prompt(10, first=100)), seconds=5.0)
    waiting = Request("waiting", prompt(17))
    engine.side.arrived(waiting)
    assert engine.side.matched_tokens(waiting, 0) is None
    engine.time += 8.0
    assert engine.side.matched_tokens(waiting, 0) is None
    engine.time += 0.1
    assert engine.side.matched_tokens(waiting, 0) == 0
    blocks = engine.take_blocks(5)
    assert not engine.side.allocated(waiting, blocks, 0)
    assert engine.side.finished(waiting) == {"tier_tokens": 0, "tier_s": pytest.approx(8.1)}


def test_short_prompts_do_not_lengthen_the_wait_of_long_ones() -> None:
    pace = PrefillPace()
    pace.computed(1000, 0.1)
    for _ in range(5):
        pace.computed(3, 0.01)
    assert pace.seconds(500) == pytest.approx(0.05, rel=0.01)


def test_a_prompt_waits_for_a_tier_before_it_is_known_how_long_it_would_take_to_compute(
    make: Make, slow: SlowTier
) -> None:
    engine = make(lower=[slow])
    waiting = Request("waiting", prompt(17))
    engine.side.arrived(waiting)
    assert engine.side.matched_tokens(waiting, 0) is None
    engine.time += 1e5
    assert engine.side.matched_tokens(waiting, 0) is None
    slow.go_on.set()
    while (found := engine.side.matched_tokens(waiting, 0)) is None:
        engine.store.nap(0.01)
    assert found == 16


def test_what_is_in_memory_is_used_when_the_rest_is_not_waited_for(make: Make, slow: SlowTier) -> None:
    engine = make(lower=[slow])
    computed(engine, Request("first", prompt(10)), seconds=5.0)
    engine.step()
    waiting = Request("waiting", prompt(17))
    engine.side.arrived(waiting)
    assert engine.side.matched_tokens(waiting, 0) is None
    engine.time += 8.1
    assert engine.side.matched_tokens(waiting, 0) == 8


def test_routers_hear_the_names_that_they_use(make: Make) -> None:
    engine = make()
    engine.serve(Request("first", prompt(17), cache_salt="s"))
    names = chain_hashes(array("I", prompt(16)), SIZE, root_hash("m", "s"))
    (entry,) = [entry for log in engine.side.take_logs() for entry in records(log)]
    assert (entry.kind, entry.medium, entry.parent) == (KvEventKind.STORED, Medium.CPU, root_hash("m", "s"))
    assert entry.names == names
    assert not engine.side.has_pending_work()


@pytest.mark.parametrize("adapter", ["", "ad:"], ids=["plain", "named by an adapter too"])
def test_routers_hear_the_names_of_blocks_with_images(make: Make, adapter: str) -> None:
    image = PromptMedia(5, 6, b"digest", b"")
    place = SimpleNamespace(offset=image.offset, length=image.length)
    feature = SimpleNamespace(identifier=adapter + image.key("s"), mm_position=place)
    engine = make()
    engine.serve(Request("first", prompt(17), cache_salt="s", mm_features=(feature,)))
    (entry,) = [entry for log in engine.side.take_logs() for entry in records(log)]
    assert entry.names == prompt_names("m", "s", "", array("I", prompt(16)), SIZE, media=(image,))
    assert entry.names != prompt_names("m", "s", "", array("I", prompt(16)), SIZE)


def test_figures_come_when_they_changed_and_not_with_every_step(make: Make) -> None:
    engine = make()
    engine.serve(Request("first", prompt(17)))
    totals = stats.TransferTotals()
    totals.add(engine.counts())
    assert [(load.medium, load.stored_blocks) for load in totals.tiers] == [(Medium.CPU, 4)]
    assert engine.counts() == {}
