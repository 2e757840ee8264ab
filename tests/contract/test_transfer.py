"""Contract of transfers: the in-memory fake, and between two processes NIXL and the NCCL adapter, which uses
sockets here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from tests.kit.engines.memory_transfer import MemoryFabric, MemoryTransfer
from tests.kit.engines.transfer_peers import LAYERS, ForkedPeer, LocalPeer, Peer, sliced

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import (
    UNSHARDED,
    BlockPart,
    LeaseEnded,
    Offer,
    PullFailed,
    PullSucceeded,
    TransferEvent,
)
from kvasir_workers.transfer.common.lease_keys import issue

BLOCK_BYTES = 4096
PATIENCE_S = 20.0
UCX_TCP = {"UCX_TLS": "tcp,self"}
LIBRARIES = {"nccl": "torch", "nixl": "nixl"}


@dataclass
class Pair:
    """A peer that offers and a peer that pulls. Names are fresh for each test."""

    source: Peer
    target: Peer
    source_endpoint: str
    names: Iterator[int]

    def name(self, kind: str) -> str:
        return f"{kind}-{next(self.names)}"

    def fill(self, *blocks: int) -> None:
        """Give blocks of the source bytes that no test before had."""
        for block in blocks:
            self.source.write(block, next(self.names))

    def offered(
        self, blocks: Sequence[int], *, ttl_s: float = 60.0, fence: int = 7, total: int | None = None
    ) -> Offer:
        return self.source.offer(self.name("lease"), fence, blocks, ttl_s, total)

    def ticket(self, lease_id: str, fence: int, *blocks: int) -> Offer:
        """A ticket that the source's engine issued, whether or not the lease is granted."""
        endpoint = issue(self.source_endpoint, lease_id, fence)
        return Offer(lease_id, fence, 60.0, blocks, len(blocks), endpoint)

    def pull(self, offer: Offer, first: int, targets: Sequence[int]) -> PullSucceeded | PullFailed:
        """Pull, and wait for how it ends."""
        pull_id = self.name("pull")
        self.target.pull(pull_id, offer, first, targets, 60.0)
        (ended,) = events(self.target, 1)
        assert isinstance(ended, PullSucceeded | PullFailed)
        assert ended.pull_id == pull_id
        return ended


def events(peer: Peer, wanted: int) -> list[TransferEvent]:
    """Poll until `wanted` events came; fails after PATIENCE_S."""
    found: list[TransferEvent] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < wanted:
        assert time.monotonic() < deadline, f"{wanted} events expected, found {found}"
        found += peer.poll()
    return found


@pytest.fixture(scope="module", params=["memory", "sliced-memory", "nixl-shm", "nixl-tcp", "nccl"])
def spawn(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Makes agents of one adapter that reach each other, by name."""
    fabric = MemoryFabric()
    processes: list[ForkedPeer] = []

    def peer(name: str) -> Any:
        if request.param == "memory":
            return LocalPeer(lambda now: MemoryTransfer(name, fabric, now))
        if request.param == "sliced-memory":
            return LocalPeer(lambda now: sliced(lambda suffix: MemoryTransfer(name + suffix, fabric, now)))
        kind = request.param.partition("-")[0]
        pytest.importorskip(LIBRARIES[kind])
        ucx = UCX_TCP if request.param == "nixl-tcp" else {}
        processes.append(ForkedPeer(name, kind, **ucx))
        return processes[-1]

    yield peer
    for process in processes:
        process.end()


@pytest.fixture(scope="module")
def shared_pair(spawn: Callable[[str], Any]) -> Pair:
    source, target = spawn("source"), spawn("target")
    endpoint = source.start(BLOCK_BYTES)
    target.start(BLOCK_BYTES)
    return Pair(source, target, endpoint, count())


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The same two agents for every test, each starting without a lease."""
    yield shared_pair
    shared_pair.source.advance(1e6)
    shared_pair.source.poll()


def failure(peer: Peer) -> PullFailed:
    """The one event that comes next, which is a failed pull."""
    (ended,) = events(peer, 1)
    assert isinstance(ended, PullFailed), ended
    return ended


def test_pulled_blocks_hold_the_source_bytes_and_the_others_stay(pair: Pair) -> None:
    for block in (3, 4, 9):
        pair.source.write(block, block)
    pair.target.write(20, 99)
    kept = pair.target.read(20)
    ended = pair.pull(pair.offered([3, 4, 9]), 0, [10, 11, 12])
    assert isinstance(ended, PullSucceeded), ended
    assert ended.bytes_moved == 3 * LAYERS * BLOCK_BYTES
    assert [pair.target.read(b) for b in (10, 11, 12)] == [pair.source.read(b) for b in (3, 4, 9)]
    assert pair.target.read(20) == kept


def test_a_comparison_of_blocks_notices_wrong_bytes(pair: Pair) -> None:
    pair.source.write(3, 1)
    assert isinstance(pair.pull(pair.offered([3]), 0, [10]), PullSucceeded)
    assert pair.target.read(10) == pair.source.read(3)
    pair.source.write(3, 2)
    assert pair.target.read(10) != pair.source.read(3)


def test_what_is_missing_may_be_pulled_into_blocks_in_any_order(pair: Pair) -> None:
    offered = [35, 30, 36, 31, 32, 33, 37]
    for block in offered:
        pair.source.write(block, block * 3)
    offer = pair.offered(offered)
    ended = pair.pull(offer, 2, [5, 6, 7, 9, 1])
    assert isinstance(ended, PullSucceeded), ended
    assert ended.bytes_moved == 5 * LAYERS * BLOCK_BYTES
    for source, target in zip(offered[2:], [5, 6, 7, 9, 1], strict=True):
        assert pair.target.read(target) == pair.source.read(source)


def test_a_pull_ends_the_lease_once_as_pulled(pair: Pair) -> None:
    offer = pair.offered([1])
    assert isinstance(pair.pull(offer, 0, [1]), PullSucceeded)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]
    pair.source.release(offer.lease_id)
    pair.source.advance(120.0)
    assert pair.source.poll() == []


def test_an_empty_pull_confirms_the_lease_without_moving_a_byte(pair: Pair) -> None:
    offer = pair.offered([1, 2])
    ended = pair.pull(offer, 0, [])
    assert isinstance(ended, PullSucceeded), ended
    assert ended.bytes_moved == 0
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]


def test_a_released_lease_is_over_and_cannot_be_pulled(pair: Pair) -> None:
    offer = pair.offered([1])
    pair.source.release(offer.lease_id)
    pair.source.release("no-such-lease")
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "released")]
    ended = pair.pull(offer, 0, [2])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "expired"


def test_a_lease_expires_at_its_deadline_and_is_never_pulled_after_it(pair: Pair) -> None:
    offer = pair.offered([1], ttl_s=10.0)
    pair.source.advance(9.9)
    assert pair.source.poll() == []
    pair.source.advance(0.2)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "expired")]
    ended = pair.pull(offer, 0, [2])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "expired"


def test_a_wrong_fence_is_refused_and_leaves_the_lease_alone(pair: Pair) -> None:
    offer = pair.offered([1], fence=5)
    ended = pair.pull(pair.ticket(offer.lease_id, 4, 1), 0, [2])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "fenced"
    assert pair.source.poll() == []
    assert isinstance(pair.pull(offer, 0, [2]), PullSucceeded)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]


def test_a_ticket_may_overtake_its_offer(pair: Pair) -> None:
    pair.source.write(6, 60)
    pair.target.pull("early-pull", pair.ticket("early", 1, 6), 0, [6], 60.0)
    for _ in range(20):
        assert pair.target.poll() == []
    pair.source.offer("early", 1, [6], 60.0)
    (ended,) = events(pair.target, 1)
    assert isinstance(ended, PullSucceeded)
    assert pair.target.read(6) == pair.source.read(6)
    assert events(pair.source, 1) == [LeaseEnded("early", "pulled")]


def test_a_lease_that_nobody_granted_times_out(pair: Pair) -> None:
    pair.target.pull("nothing", pair.ticket("unknown", 1, 1), 0, [1], 5.0)
    for _ in range(20):
        assert pair.target.poll() == []
    pair.target.advance(5.0)
    (ended,) = events(pair.target, 1)
    assert isinstance(ended, PullFailed)
    assert ended.reason == "timeout"


def test_a_live_lease_cannot_be_offered_again(pair: Pair) -> None:
    offer = pair.offered([1])
    with pytest.raises(TransferError, match="live already"):
        pair.source.offer(offer.lease_id, 8, [2], 60.0)


def test_a_block_outside_the_offer_is_refused(pair: Pair) -> None:
    offer = pair.offered([1, 2])
    ended = pair.pull(offer, 1, [3, 4])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "layout"


def until_equal(pair: Pair, source: int, target: int) -> None:
    """Poll until a block has arrived, with no pull ended."""
    deadline = time.monotonic() + PATIENCE_S
    while pair.target.read(target) != pair.source.read(source):
        assert time.monotonic() < deadline, f"block {source} never arrived"
        assert pair.source.poll() == []
        assert pair.target.poll() == []


def test_blocks_move_as_they_become_complete_and_the_lease_ends_with_the_last(pair: Pair) -> None:
    pair.fill(3, 4, 9, 20, 21)
    offer = pair.offered([3, 4], total=5)
    assert (offer.blocks, offer.total) == ((3, 4), 5)
    pair.target.pull("growing", offer, 1, [10, 11, 12, 13], 60.0)
    until_equal(pair, 4, 10)
    pair.source.extend(offer.lease_id, [9, 20])
    pair.source.extend("no-such-lease", [5])
    until_equal(pair, 20, 12)
    pair.source.extend(offer.lease_id, [21])
    (ended,) = events(pair.target, 1)
    assert isinstance(ended, PullSucceeded), ended
    assert ended.bytes_moved == 4 * LAYERS * BLOCK_BYTES
    assert [pair.target.read(b) for b in (10, 11, 12, 13)] == [pair.source.read(b) for b in (4, 9, 20, 21)]
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]


def test_a_pull_of_blocks_that_were_complete_needs_no_more_of_the_lease(pair: Pair) -> None:
    pair.fill(3, 4)
    offer = pair.offered([3, 4], total=5)
    assert isinstance(pair.pull(offer, 0, [10, 11]), PullSucceeded)


def test_a_pull_times_out_when_nothing_more_becomes_complete(pair: Pair) -> None:
    pair.fill(3, 4)
    pair.target.write(11, 99)
    offer = pair.offered([], total=3)
    pair.target.pull("slow", offer, 0, [10, 11, 12], 5.0)
    for _ in range(20):
        assert pair.target.poll() == []
    pair.target.advance(4.0)
    pair.source.extend(offer.lease_id, [3])
    until_equal(pair, 3, 10)
    # A block is progress once it is noted, which is before the next one is received.
    pair.source.extend(offer.lease_id, [4])
    until_equal(pair, 4, 11)
    pair.target.advance(4.0)
    for _ in range(20):
        assert pair.target.poll() == []
    pair.target.advance(5.0)
    assert failure(pair.target).reason == "timeout"


def test_a_lease_that_grows_runs_anew_from_there(pair: Pair) -> None:
    offer = pair.offered([1], ttl_s=10.0, total=2)
    pair.source.advance(8.0)
    pair.source.extend(offer.lease_id, [2])
    pair.source.advance(9.0)
    assert pair.source.poll() == []
    pair.source.advance(1.1)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "expired")]


def test_a_lease_that_ends_before_it_is_complete_fails_the_pull(pair: Pair) -> None:
    pair.fill(3)
    offer = pair.offered([3], total=2)
    pair.target.pull("cut", offer, 0, [10, 11], 60.0)
    until_equal(pair, 3, 10)
    pair.source.release(offer.lease_id)
    assert failure(pair.target).reason == "expired"


def test_a_block_that_changed_after_it_was_offered_is_a_failed_pull(pair: Pair) -> None:
    pair.fill(3, 4, 5)
    offer = pair.offered([3, 4, 5])
    pair.source.write(4, 77)
    ended = pair.pull(offer, 0, [10, 11, 12])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "checksum"
    assert isinstance(pair.pull(pair.offered([3, 4, 5]), 0, [10, 11, 12]), PullSucceeded)


@dataclass
class Ranks:
    """One rank that holds all heads, and two that hold half of them each."""

    whole: Peer
    halves: tuple[Peer, Peer]


@pytest.fixture(scope="module")
def ranks(spawn: Callable[[str], Any]) -> Ranks:
    whole, *halves = spawn("whole"), spawn("first half"), spawn("second half")
    whole.start(BLOCK_BYTES)
    for half in halves:
        half.start(BLOCK_BYTES // 2, "float32", 2)
    return Ranks(whole, (halves[0], halves[1]))


def layers(block: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(block, dtype=np.uint8).reshape(LAYERS, -1)


def test_each_of_two_ranks_pulls_its_half_of_the_heads_of_one(ranks: Ranks) -> None:
    for block in (3, 4):
        ranks.whole.write(block, block)
    offer = ranks.whole.offer("to halves", 1, [3], 60.0, 2)
    ranks.whole.extend("to halves", [4])
    for index, half in enumerate(ranks.halves):
        assert ranks.whole.poll() == []
        half.pull("p", offer, 0, [8, 7], 60.0, BlockPart(index, 2))
        (ended,) = events(half, 1)
        assert isinstance(ended, PullSucceeded), ended
        assert ended.bytes_moved == LAYERS * BLOCK_BYTES
    assert events(ranks.whole, 1) == [LeaseEnded("to halves", "pulled")]
    for source, target in ((3, 8), (4, 7)):
        halves = [layers(half.read(target)) for half in ranks.halves]
        assert (np.hstack(halves) == layers(ranks.whole.read(source))).all()


def test_a_lease_of_which_several_read_all_ends_when_each_has(pair: Pair) -> None:
    pair.fill(3)
    offer = pair.offered([3])
    for index, target in enumerate((10, 11)):
        assert [each for each in pair.source.poll() if isinstance(each, LeaseEnded)] == []
        pair.target.pull(
            f"{offer.lease_id} {index}",
            offer,
            0,
            [target],
            60.0,
            UNSHARDED,
            UNSHARDED,
            BlockPart(index, 2),
        )
        (ended,) = events(pair.target, 1)
        assert isinstance(ended, PullSucceeded), ended
        assert pair.target.read(target) == pair.source.read(3)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]


def test_one_rank_pulls_both_halves_of_the_heads_from_two(ranks: Ranks) -> None:
    for index, half in enumerate(ranks.halves):
        half.write(3, 30 + index)
        offer = half.offer(f"from half {index}", 1, [3], 60.0)
        ranks.whole.pull(f"p{index}", offer, 0, [20], 60.0, UNSHARDED, BlockPart(index, 2))
    for ended in events(ranks.whole, 2):
        assert isinstance(ended, PullSucceeded), ended
        assert ended.bytes_moved == LAYERS * BLOCK_BYTES // 2
    for index, half in enumerate(ranks.halves):
        assert events(half, 1) == [LeaseEnded(f"from half {index}", "pulled")]
    halves = [layers(half.read(3)) for half in ranks.halves]
    assert (np.hstack(halves) == layers(ranks.whole.read(20))).all()


def test_parts_that_differ_in_size_are_refused(ranks: Ranks) -> None:
    offer = ranks.whole.offer("whole", 1, [3], 60.0)
    ranks.halves[0].pull("p", offer, 0, [3], 60.0)
    assert failure(ranks.halves[0]).reason == "layout"
    ranks.whole.release("whole")
    assert events(ranks.whole, 1) == [LeaseEnded("whole", "released")]


def test_many_pulls_at_once_each_end_once(pair: Pair) -> None:
    offers = []
    for block in range(40):
        pair.source.write(block, block + 100)
        offers.append(pair.offered([block]))
    for block, offer in enumerate(offers):
        pair.target.pull(f"many-{block}", offer, 0, [39 - block], 60.0)
    ended = events(pair.target, 40)
    assert sorted(e.pull_id for e in ended if isinstance(e, PullSucceeded)) == sorted(
        f"many-{b}" for b in range(40)
    )
    for block in range(40):
        assert pair.target.read(39 - block) == pair.source.read(block)
    assert len({e.lease_id for e in events(pair.source, 40) if isinstance(e, LeaseEnded)}) == 40


@dataclass
class Processes:
    """Agents of one adapter, each in a process of its own, from the test's start to its end."""

    kind: str
    started: list[ForkedPeer]
    ucx: dict[str, str]

    def start(self, block_bytes: int, dtype: str = "float32") -> tuple[ForkedPeer, str]:
        """One more agent, and its endpoint."""
        peer = ForkedPeer(f"peer-{len(self.started)}", self.kind, **self.ucx)
        self.started.append(peer)
        return peer, peer.start(block_bytes, dtype)


@pytest.fixture(
    params=[
        "nixl",
        pytest.param("nixl-tcp", marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param("nccl", marks=pytest.mark.slow),
    ]
)
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    kind, _, tcp = request.param.partition("-")
    pytest.importorskip(LIBRARIES[kind])
    processes = Processes(kind, [], UCX_TCP if tcp else {})
    yield processes
    for process in processes.started:
        process.end()


def test_agents_on_one_machine_exchange_kv_over_nixl_without_a_port() -> None:
    pytest.importorskip("nixl")
    source, target = (ForkedPeer(name) for name in ("without-port", "without-port-either"))
    try:
        source.start(BLOCK_BYTES)
        target.start(BLOCK_BYTES)
        source.write(1, 3)
        target.pull("p", source.offer("l", 1, [1], 60.0), 0, [2], 60.0)
        assert isinstance(events(target, 1)[0], PullSucceeded)
        assert target.read(2) == source.read(1)
        for peer in (source, target):
            assert psutil.Process(peer.pid).net_connections("inet") == []
    finally:
        source.end()
        target.end()


def test_another_layout_is_refused_and_named(processes: Processes) -> None:
    source, _ = processes.start(BLOCK_BYTES, "float16")
    target, _ = processes.start(BLOCK_BYTES)
    target.pull("p", source.offer("l", 1, [1], 60.0), 0, [1], 60.0)
    ended = failure(target)
    assert ended.reason == "layout"
    assert "dtype: float32 != float16" in ended.detail


def test_a_dead_sender_fails_the_pull_and_spares_the_others(processes: Processes) -> None:
    dying, _ = processes.start(BLOCK_BYTES)
    living, _ = processes.start(BLOCK_BYTES)
    target, _ = processes.start(BLOCK_BYTES)
    warm = dying.offer("warm", 1, [1], 60.0)
    target.pull("warm", warm, 0, [1], 60.0)
    assert isinstance(events(target, 1)[0], PullSucceeded)
    lost = dying.offer("lost", 1, [1], 60.0)
    os.kill(dying.pid, signal.SIGKILL)
    dying.end()
    for attempt in ("first", "second"):
        target.pull(attempt, lost, 0, [2], 60.0)
        assert failure(target).reason in ("unreachable", "io")
    living.write(1, 5)
    target.pull("healthy", living.offer("l", 1, [1], 60.0), 0, [3], 60.0)
    assert isinstance(events(target, 1)[0], PullSucceeded)
    assert target.read(3) == living.read(1)


def test_a_sender_that_dies_between_the_first_and_the_last_piece_fails_the_pull(processes: Processes) -> None:
    dying, _ = processes.start(BLOCK_BYTES)
    living, _ = processes.start(BLOCK_BYTES)
    target, _ = processes.start(BLOCK_BYTES)
    for block in (1, 2):
        dying.write(block, 7)
    living.write(1, 5)
    offer = dying.offer("lost", 1, [1], 60.0, 2)
    target.pull("lost", offer, 0, [3, 4], 60.0)
    before, first = target.read(4), dying.read(1)
    deadline = time.monotonic() + PATIENCE_S
    while target.read(3) != first:
        assert target.poll() == []
        assert time.monotonic() < deadline, "the first piece did not arrive"
        dying.poll()
    os.kill(dying.pid, signal.SIGKILL)
    dying.end()
    assert failure(target).reason in ("unreachable", "io")
    assert target.read(4) == before
    target.pull("again", offer, 0, [6], 60.0)
    assert failure(target).reason in ("unreachable", "io")
    target.pull("healthy", living.offer("l", 1, [1], 60.0), 0, [5], 60.0)
    assert isinstance(events(target, 1)[0], PullSucceeded)
    assert target.read(5) == living.read(1)


def test_a_sender_that_hangs_times_out_writes_nothing_afterwards_and_serves_again(
    processes: Processes,
) -> None:
    block_bytes = 1 << 20
    hanging, _ = processes.start(block_bytes)
    living, _ = processes.start(block_bytes)
    target, _ = processes.start(block_bytes)
    blocks = list(range(48))
    for block in blocks:
        hanging.write(block, 1)
        target.write(block, 2)
    before = [target.read(block) for block in (0, 47)]
    # Of a sender that it has met a receiver asks more before it hears that nothing answers.
    target.pull("warm", hanging.offer("warm", 1, [0], 60.0), 0, [62], 60.0)
    assert isinstance(events(target, 1)[0], PullSucceeded)
    # The kernel also reads a process that is stopped, so that the pull waits for blocks that do not come.
    offer = hanging.offer("stuck", 1, blocks[:24], 60.0, len(blocks))
    living.write(1, 9)
    healthy = living.offer("healthy", 1, [1], 60.0)
    os.kill(hanging.pid, signal.SIGSTOP)
    try:
        target.pull("stuck", offer, 0, blocks, 5.0)
        for _ in range(50):
            assert target.poll() == []
        target.advance(5.0)
        assert failure(target).reason == "timeout"
        for block in blocks:
            target.write(block, 2)
    finally:
        os.kill(hanging.pid, signal.SIGCONT)
    target.pull("healthy", healthy, 0, [60], 60.0)
    assert isinstance(events(target, 1)[0], PullSucceeded)
    assert target.read(60) == living.read(1)
    assert [target.read(block) for block in (0, 47)] == before
    hanging.write(1, 8)
    target.pull("awake", hanging.offer("awake", 1, [1], 60.0), 0, [61], 60.0)
    assert isinstance(events(target, 1)[0], PullSucceeded)
    assert target.read(61) == hanging.read(1)


def test_closing_ends_pulls_and_leases(processes: Processes) -> None:
    source, endpoint = processes.start(BLOCK_BYTES)
    target, _ = processes.start(BLOCK_BYTES)
    source.offer("open", 1, [1], 60.0)
    ticket = Offer("unknown", 1, 60.0, (1,), 1, issue(endpoint, "unknown", 1))
    target.pull("open", ticket, 0, [1], 60.0)
    target.poll()
    target.close()
    source.close()
    source.close()
    assert source.poll() == [LeaseEnded("open", "released")]
    assert failure(target).reason == "closed"


def test_a_garbled_endpoint_is_a_failed_pull(processes: Processes) -> None:
    target, _ = processes.start(BLOCK_BYTES)
    for endpoint in ("", "garbage", "0" * 300, "é"):
        target.pull(f"from {endpoint}", Offer("l", 1, 60.0, (1,), 1, endpoint), 0, [1], 60.0)
        ended = failure(target)
        assert (ended.pull_id, ended.reason) == (f"from {endpoint}", "layout")
