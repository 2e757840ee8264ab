"""What every adapter of the transfer port must hold: the in-memory fake, and NIXL between two processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import LeaseEnded, Offer, Pulled, PullFailed, TransferEvent
from kvasir_platform.sim.memory_transfer import MemoryFabric, MemoryTransfer
from kvasir_platform.sim.transfer_peers import LAYERS, LocalPeer, Peer, ProcessPeer

BLOCK_BYTES = 4096
PATIENCE_S = 20.0
UCX_TCP = {"UCX_TLS": "tcp,self"}


@dataclass
class Pair:
    """A peer that offers and a peer that pulls. Names are fresh for each test."""

    source: Peer
    target: Peer
    source_endpoint: str
    names: Iterator[int]

    def name(self, kind: str) -> str:
        return f"{kind}-{next(self.names)}"

    def offered(self, blocks: Sequence[int], *, ttl_s: float = 60.0, fence: int = 7) -> Offer:
        return self.source.offer(self.name("lease"), fence, blocks, ttl_s)

    def pull(
        self, offer: Offer, source: Sequence[int], target: Sequence[int], timeout_s: float = 60.0
    ) -> Pulled | PullFailed:
        """Pull, and wait for how it ends."""
        pull_id = self.name("pull")
        self.target.pull(pull_id, offer, source, target, timeout_s)
        (ended,) = events(self.target, 1)
        assert isinstance(ended, Pulled | PullFailed)
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


def memory_peers() -> tuple[Peer, Peer]:
    fabric = MemoryFabric()

    def peer(name: str) -> LocalPeer:
        return LocalPeer(lambda now: MemoryTransfer(name, fabric, now))

    return peer("source"), peer("target")


@pytest.fixture(scope="module", params=["memory", "nixl-shm", "nixl-tcp"])
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    processes: list[ProcessPeer] = []
    source: Any
    target: Any
    if request.param == "memory":
        source, target = memory_peers()
    else:
        pytest.importorskip("nixl")
        ucx = UCX_TCP if request.param == "nixl-tcp" else {"UCX_TLS": "tcp,sm,self"}
        source, target = ProcessPeer("source", **ucx), ProcessPeer("target", **ucx)
        processes = [source, target]
    endpoint = source.start(BLOCK_BYTES)
    target.start(BLOCK_BYTES)
    yield Pair(source, target, endpoint, count())
    for process in processes:
        process.end()


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
    ended = pair.pull(pair.offered([3, 4, 9]), [3, 4, 9], [10, 11, 12])
    assert isinstance(ended, Pulled), ended
    assert ended.bytes_moved == 3 * LAYERS * BLOCK_BYTES
    assert [pair.target.read(b) for b in (10, 11, 12)] == [pair.source.read(b) for b in (3, 4, 9)]
    assert pair.target.read(20) == kept


def test_a_comparison_of_blocks_notices_wrong_bytes(pair: Pair) -> None:
    pair.source.write(3, 1)
    assert isinstance(pair.pull(pair.offered([3]), [3], [10]), Pulled)
    assert pair.target.read(10) == pair.source.read(3)
    pair.source.write(3, 2)
    assert pair.target.read(10) != pair.source.read(3)


def test_a_subset_may_be_pulled_in_any_order(pair: Pair) -> None:
    for block in range(30, 38):
        pair.source.write(block, block * 3)
    offer = pair.offered(range(30, 38))
    ended = pair.pull(offer, [36, 31, 32, 33, 30], [5, 6, 8, 9, 1])
    assert isinstance(ended, Pulled), ended
    assert ended.bytes_moved == 5 * LAYERS * BLOCK_BYTES
    for source, target in zip([36, 31, 32, 33, 30], [5, 6, 8, 9, 1], strict=True):
        assert pair.target.read(target) == pair.source.read(source)


def test_a_pull_ends_the_lease_once_as_pulled(pair: Pair) -> None:
    offer = pair.offered([1])
    assert isinstance(pair.pull(offer, [1], [1]), Pulled)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]
    pair.source.release(offer.lease_id)
    pair.source.advance(120.0)
    assert pair.source.poll() == []


def test_an_empty_pull_confirms_the_lease_without_moving_a_byte(pair: Pair) -> None:
    offer = pair.offered([1, 2])
    ended = pair.pull(offer, [], [])
    assert isinstance(ended, Pulled), ended
    assert ended.bytes_moved == 0
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]


def test_a_released_lease_is_over_and_cannot_be_pulled(pair: Pair) -> None:
    offer = pair.offered([1])
    pair.source.release(offer.lease_id)
    pair.source.release("no-such-lease")
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "released")]
    ended = pair.pull(offer, [1], [2])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "expired"


def test_a_lease_expires_at_its_deadline_and_is_never_pulled_after_it(pair: Pair) -> None:
    offer = pair.offered([1], ttl_s=10.0)
    pair.source.advance(9.9)
    assert pair.source.poll() == []
    pair.source.advance(0.2)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "expired")]
    ended = pair.pull(offer, [1], [2])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "expired"


def test_a_wrong_fence_is_refused_and_leaves_the_lease_alone(pair: Pair) -> None:
    offer = pair.offered([1], fence=5)
    ended = pair.pull(replace(offer, fence=4), [1], [2])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "fenced"
    assert pair.source.poll() == []
    assert isinstance(pair.pull(offer, [1], [2]), Pulled)
    assert events(pair.source, 1) == [LeaseEnded(offer.lease_id, "pulled")]


def test_a_ticket_may_overtake_its_offer(pair: Pair) -> None:
    pair.source.write(6, 60)
    early = Offer("early", 1, 60.0, (6,), pair.source_endpoint)
    pair.target.pull("early-pull", early, [6], [6], 60.0)
    for _ in range(20):
        assert pair.target.poll() == []
    pair.source.offer("early", 1, [6], 60.0)
    (ended,) = events(pair.target, 1)
    assert isinstance(ended, Pulled)
    assert pair.target.read(6) == pair.source.read(6)
    assert events(pair.source, 1) == [LeaseEnded("early", "pulled")]


def test_a_lease_that_nobody_granted_times_out(pair: Pair) -> None:
    pair.target.pull("nothing", Offer("unknown", 1, 60.0, (1,), pair.source_endpoint), [1], [1], 5.0)
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
    ended = pair.pull(offer, [3], [3])
    assert isinstance(ended, PullFailed)
    assert ended.reason == "layout"


def test_many_pulls_at_once_each_end_once(pair: Pair) -> None:
    offers = []
    for block in range(40):
        pair.source.write(block, block + 100)
        offers.append(pair.offered([block]))
    for block, offer in enumerate(offers):
        pair.target.pull(f"many-{block}", offer, [block], [39 - block], 60.0)
    ended = events(pair.target, 40)
    assert sorted(e.pull_id for e in ended if isinstance(e, Pulled)) == sorted(f"many-{b}" for b in range(40))
    for block in range(40):
        assert pair.target.read(39 - block) == pair.source.read(block)
    assert len({e.lease_id for e in events(pair.source, 40) if isinstance(e, LeaseEnded)}) == 40


@pytest.fixture
def processes() -> Iterator[list[ProcessPeer]]:
    pytest.importorskip("nixl")
    started: list[ProcessPeer] = []
    yield started
    for process in started:
        process.end()


def _start(processes: list[ProcessPeer], block_bytes: int, dtype: str = "float32") -> tuple[ProcessPeer, str]:
    peer = ProcessPeer(f"peer-{len(processes)}", **UCX_TCP)
    processes.append(peer)
    return peer, peer.start(block_bytes, dtype)


def test_another_layout_is_refused_and_named(processes: list[ProcessPeer]) -> None:
    source, _ = _start(processes, BLOCK_BYTES, "float16")
    target, _ = _start(processes, BLOCK_BYTES)
    target.pull("p", source.offer("l", 1, [1], 60.0), [1], [1], 60.0)
    ended = failure(target)
    assert ended.reason == "layout"
    assert "dtype: float32 != float16" in ended.detail


def test_a_dead_sender_fails_the_pull_and_spares_the_others(processes: list[ProcessPeer]) -> None:
    dying, _ = _start(processes, BLOCK_BYTES)
    living, _ = _start(processes, BLOCK_BYTES)
    target, _ = _start(processes, BLOCK_BYTES)
    warm = dying.offer("warm", 1, [1], 60.0)
    target.pull("warm", warm, [1], [1], 60.0)
    assert isinstance(events(target, 1)[0], Pulled)
    lost = dying.offer("lost", 1, [1], 60.0)
    os.kill(dying.pid, signal.SIGKILL)
    dying.end()
    for attempt in ("first", "second"):
        target.pull(attempt, lost, [1], [2], 60.0)
        assert failure(target).reason in ("unreachable", "io")
    living.write(1, 5)
    target.pull("healthy", living.offer("l", 1, [1], 60.0), [1], [3], 60.0)
    assert isinstance(events(target, 1)[0], Pulled)
    assert target.read(3) == living.read(1)


def test_a_sender_that_hangs_times_out_and_never_writes_afterwards(processes: list[ProcessPeer]) -> None:
    block_bytes = 1 << 20
    hanging, _ = _start(processes, block_bytes)
    living, _ = _start(processes, block_bytes)
    target, _ = _start(processes, block_bytes)
    blocks = list(range(48))
    for block in blocks:
        hanging.write(block, 1)
        target.write(block, 2)
    before = [target.read(block) for block in (0, 47)]
    offer = hanging.offer("stuck", 1, blocks, 60.0)
    living.write(1, 9)
    healthy = living.offer("healthy", 1, [1], 60.0)
    os.kill(hanging.pid, signal.SIGSTOP)
    try:
        target.pull("stuck", offer, blocks, blocks, 5.0)
        for _ in range(50):
            assert target.poll() == []
        target.advance(5.0)
        assert failure(target).reason == "timeout"
        for block in blocks:
            target.write(block, 2)
    finally:
        os.kill(hanging.pid, signal.SIGCONT)
    target.pull("healthy", healthy, [1], [60], 60.0)
    assert isinstance(events(target, 1)[0], Pulled)
    assert target.read(60) == living.read(1)
    assert [target.read(block) for block in (0, 47)] == before


def test_closing_ends_pulls_and_leases(processes: list[ProcessPeer]) -> None:
    source, endpoint = _start(processes, BLOCK_BYTES)
    target, _ = _start(processes, BLOCK_BYTES)
    source.offer("open", 1, [1], 60.0)
    target.pull("open", Offer("unknown", 1, 60.0, (1,), endpoint), [1], [1], 60.0)
    target.poll()
    source.close()
    target.close()
    source.close()
    assert source.poll() == [LeaseEnded("open", "released")]
    assert failure(target).reason == "closed"


@pytest.mark.parametrize("endpoint", ["", "garbage", "0" * 300, "é"])
def test_a_garbled_endpoint_is_a_failed_pull(processes: list[ProcessPeer], endpoint: str) -> None:
    target, _ = _start(processes, BLOCK_BYTES)
    target.pull("p", Offer("l", 1, 60.0, (1,), endpoint), [1], [1], 60.0)
    ended = failure(target)
    assert ended.reason == "layout"
