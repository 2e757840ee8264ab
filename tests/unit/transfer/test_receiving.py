"""The pulling side over an agent made of lists: what the network does is decided by the test."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import WHOLE, KvRegion, Offer, Part, Pulled, PullFailed
from kvasir_workers.transfer.checksums import Sums
from kvasir_workers.transfer.nixl import endpoint, leases, pulls, receiving
from kvasir_workers.transfer.nixl.agent import Descriptor, Descriptors, NixlAgent, XferState
from kvasir_workers.transfer.nixl.endpoint import Endpoint
from kvasir_workers.transfer.nixl.leases import LeaseTable
from kvasir_workers.transfer.nixl.pages import PageMemory, PageWriter, page_bytes
from kvasir_workers.transfer.nixl.receiving import ReceivingSide

BLOCK_BYTES = 1 << 20
LAYOUT = KvLayout(32, "float32", "BHNC", 1, 4, 32, BLOCK_BYTES)
REGION = KvRegion(1 << 40, BLOCK_BYTES, 64)
HALVES = replace(LAYOUT, kv_heads=2, bytes_per_block=BLOCK_BYTES // 2, tensor_parallel_size=2)
"""What one of two ranks holds."""


@dataclass
class Read:
    """A read that was posted; the test moves its state."""

    peer: str
    local: list[Descriptor]
    remote: list[Descriptor]
    state: XferState = XferState.RUNNING


def tuples(rows: Descriptors) -> list[Descriptor]:
    return [(int(address), int(length), int(device)) for address, length, device in rows]


@dataclass
class Network:
    """Every agent ever made, every read ever posted. `table` and `pages` answer reads of leases at once."""

    table: LeaseTable = field(default_factory=LeaseTable)
    pages: PageMemory = field(default_factory=lambda: PageMemory(1 << 16))
    reads: list[Read] = field(default_factory=list)
    agents: list[FakeAgent] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    answers_lease_reads: bool = True

    def make_agent(self) -> FakeAgent:
        self.agents.append(FakeAgent(self))
        return self.agents[-1]

    def blocks(self) -> list[Read]:
        return [read for read in self.reads if read.local[0][1] != leases.BUCKET_BYTES]


class FakeAgent(NixlAgent):
    """Agent calls, recorded."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.peers: set[str] = set()
        self.closed = False

    def register(self, regions: Sequence[Descriptor], device: str) -> None:
        assert not self.closed

    def add_peer(self, metadata: bytes, name: str) -> None:
        if metadata == b"unreachable":
            raise TransferError(f"agent {name} is unreachable")
        self.peers.add(name)

    def forget_peer(self, name: str) -> None:
        self.peers.discard(name)

    def read(self, peer: str, local: Descriptors, remote: Descriptors, device: str) -> int:
        assert peer in self.peers
        read = Read(peer, tuples(local), tuples(remote))
        if read.local[0][1] == leases.BUCKET_BYTES and self._network.answers_lease_reads:
            for (mine, size, _), (theirs, _, _) in zip(read.local, read.remote, strict=True):
                ctypes.memmove(mine, theirs, size)
            read.state = XferState.DONE
        self._network.reads.append(read)
        return len(self._network.reads) - 1

    def state(self, handle: int) -> XferState:
        assert not self.closed
        return self._network.reads[handle].state

    def release(self, handle: int) -> None:
        assert self._network.reads[handle].state is not XferState.RUNNING

    def notify(self, peer: str, message: bytes) -> None:
        self._network.notices.append(peer)

    def close(self) -> None:
        self.closed = True


class ScriptedSums:
    """Sums that the test knows: of block n they are n, n + 1000, n + 2000, … for its parts."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Sums], Sums]] = []
        self.hold = False

    def begin(self, blocks: Sequence[int], parts: int, part: Part = WHOLE) -> Future[Sums]:
        found: Future[Sums] = Future()
        sums = sums_of(blocks, range(parts))
        if self.hold:
            self.held.append((found, sums))
        else:
            found.set_result(sums)
        return found

    def close(self) -> None:
        self.held.clear()


def sums_of(blocks: Sequence[int], parts: Sequence[int]) -> Sums:
    return np.array([[block + 1000 * part for part in parts] for block in blocks], dtype=np.uint64)


class Bench:
    """A receiving side on a fake network; `now` is the clock. The sender gives `parts` sums for a block."""

    def __init__(self, parts: int = 0, layout: KvLayout = LAYOUT, region: KvRegion = REGION) -> None:
        self.now = 0.0
        self.parts = parts
        self.network = Network()
        self.sums = ScriptedSums()
        self.side = ReceivingSide(self.network.make_agent, [region], layout, self.sums, lambda: self.now)

    def offer(
        self, lease_id: str, peer: str = "peer", metadata: bytes = b"", *, told: int = 64, total: int = 64
    ) -> Offer:
        network = self.network
        table, pages = network.table.address, network.pages
        text = endpoint.encode(
            Endpoint(
                endpoint.VERSION,
                peer,
                metadata,
                (REGION,),
                table,
                pages.address,
                len(pages.bytes),
                self.parts,
                LAYOUT,
            )
        )
        return Offer(lease_id, 1, 60.0, tuple(range(told)), total, text)

    def page(self, lease_id: str, total: int) -> PageWriter:
        """Grant a lease that has a page."""
        extent = self.network.pages.take(page_bytes(total, self.parts))
        assert extent is not None
        self.network.table.grant(lease_id, 1, extent)
        return PageWriter(self.network.pages.view(extent), lease_id, 1, total, self.parts)

    def pull(
        self,
        lease_id: str,
        blocks: int = 1,
        *,
        peer: str = "peer",
        timeout_s: float = 5.0,
        grant: bool = True,
    ) -> None:
        if grant:
            self.network.table.grant(lease_id, 1)
        self.side.pull(lease_id, self.offer(lease_id, peer), 0, range(blocks), timeout_s)

    def arrive(self) -> None:
        """Every read of blocks that runs is done."""
        for read in self.network.blocks():
            if read.state is XferState.RUNNING:
                read.state = XferState.DONE

    def read_blocks(self) -> list[int]:
        """The sender's blocks that were read, in order."""
        descriptors = [d for read in self.network.blocks() for d in read.remote]
        return [
            (address - REGION.address) // BLOCK_BYTES + at
            for address, length, _ in descriptors
            for at in range(length // BLOCK_BYTES)
        ]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def reasons(ended: Sequence[Pulled | PullFailed]) -> dict[str, str]:
    return {each.pull_id: each.reason if isinstance(each, PullFailed) else "pulled" for each in ended}


def test_the_lease_is_read_after_the_last_byte_and_the_sender_told(bench: Bench) -> None:
    bench.pull("a")
    assert bench.side.poll() == []
    assert len(bench.network.reads) == 1
    bench.network.reads[0].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"a": "pulled"}
    assert len(bench.network.reads) == 2
    assert bench.network.notices == ["peer"]


def test_a_lease_that_ended_while_its_blocks_were_read_is_not_pulled(bench: Bench) -> None:
    bench.pull("a")
    bench.side.poll()
    bench.network.table.end("a")
    bench.network.reads[0].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"a": "expired"}
    assert bench.network.notices == []


def test_a_large_pull_is_posted_in_batches(bench: Bench) -> None:
    bench.pull("a", blocks=40)
    bench.side.poll()
    sizes = [sum(length for _, length, _ in read.local) for read in bench.network.blocks()]
    assert sizes == [pulls.BATCH_BYTES] * 5
    assert [d for read in bench.network.blocks() for d in read.local] == [
        (REGION.address + i * pulls.BATCH_BYTES, pulls.BATCH_BYTES, 0) for i in range(5)
    ]


def test_a_read_that_breaks_off_fails_the_pull_once_the_others_have_settled(bench: Bench) -> None:
    bench.pull("a", blocks=16)
    bench.side.poll()
    bench.network.reads[0].state = XferState.FAILED
    assert bench.side.poll() == []
    bench.network.reads[1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"a": "io"}


def test_a_late_pull_fails_only_when_its_agent_is_gone(bench: Bench) -> None:
    bench.pull("late")
    bench.side.poll()
    bench.now = 4.0
    bench.pull("healthy", peer="other")
    bench.side.poll()
    bench.now = 5.0
    assert bench.side.poll() == []
    assert not bench.network.agents[0].closed
    bench.network.reads[1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"healthy": "pulled", "late": "timeout"}
    assert [agent.closed for agent in bench.network.agents] == [True, False]


def test_pulls_that_come_while_a_late_one_is_fenced_wait_for_the_new_agent(bench: Bench) -> None:
    bench.pull("late")
    bench.side.poll()
    bench.now = 4.0
    bench.pull("healthy", peer="other")
    bench.side.poll()
    bench.now = 5.0
    bench.side.poll()
    bench.pull("new", peer="third")
    assert bench.side.poll() == []
    assert len(bench.network.blocks()) == 2
    bench.network.reads[1].state = XferState.DONE
    bench.side.poll()
    bench.side.poll()
    assert bench.network.blocks()[-1].peer == "third"
    bench.network.reads[-1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"new": "pulled"}


def test_two_pulls_that_hang_do_not_hold_each_other_for_ever(bench: Bench) -> None:
    bench.pull("one", timeout_s=5.0)
    bench.pull("two", timeout_s=8.0)
    bench.side.poll()
    bench.now = 5.0
    assert bench.side.poll() == []
    bench.now = 8.0
    assert reasons(bench.side.poll()) == {"one": "timeout", "two": "timeout"}


def test_a_lease_read_that_hangs_times_out(bench: Bench) -> None:
    bench.network.answers_lease_reads = False
    bench.pull("a")
    bench.side.poll()
    bench.network.reads[0].state = XferState.DONE
    assert bench.side.poll() == []
    bench.now = 5.0
    assert reasons(bench.side.poll()) == {"a": "timeout"}
    assert bench.network.agents[0].closed


def test_an_absent_lease_is_read_again_until_it_is_granted(bench: Bench) -> None:
    bench.pull("a", grant=False)
    bench.side.poll()
    bench.network.reads[0].state = XferState.DONE
    assert bench.side.poll() == []
    assert bench.side.poll() == []
    bench.network.table.grant("a", 1)
    assert reasons(bench.side.poll()) == {"a": "pulled"}


def test_an_unreachable_sender_fails_the_pull_at_once(bench: Bench) -> None:
    bench.side.pull("a", bench.offer("a", "gone", b"unreachable"), 1, [1], 5.0)
    assert reasons(bench.side.poll()) == {"a": "unreachable"}


def test_a_sender_that_broke_off_is_connected_to_anew(bench: Bench) -> None:
    bench.pull("a")
    bench.side.poll()
    bench.network.reads[0].state = XferState.FAILED
    assert reasons(bench.side.poll()) == {"a": "io"}
    bench.pull("b")
    bench.side.poll()
    bench.network.reads[-1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"b": "pulled"}


def test_known_senders_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_PEERS", 3)
    for number in range(8):
        bench.pull(f"lease-{number}", peer=f"peer-{number}")
        bench.side.poll()
        bench.network.reads[-1].state = XferState.DONE
        assert reasons(bench.side.poll()) == {f"lease-{number}": "pulled"}
    assert bench.network.agents[0].peers == {"peer-5", "peer-6", "peer-7"}


def test_pulls_under_way_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(receiving.MAX_PULLS + 1):
        bench.side.pull(f"{number}", bench.offer("unknown"), 0, [], 5.0)
    assert reasons(bench.side.poll()) == {f"{receiving.MAX_PULLS}": "io"}


def test_a_pull_id_under_way_cannot_be_used_again(bench: Bench) -> None:
    bench.pull("a")
    with pytest.raises(TransferError, match="under way already"):
        bench.pull("a", grant=False)


def test_a_pull_that_does_not_fit_is_refused(bench: Bench) -> None:
    bench.side.pull("target outside memory", bench.offer("a"), 1, [64], 5.0)
    bench.side.pull("more than offered", bench.offer("a"), 63, [1, 2], 5.0)
    bench.side.pull("before the first", bench.offer("a"), -1, [1], 5.0)
    bench.side.pull("source outside memory", bench.offer("a", told=65, total=65), 64, [1], 5.0)
    bench.side.pull("half into whole", bench.offer("a"), 0, [1], 5.0, source=Part(0, 2))
    bench.side.pull("no such part", bench.offer("a"), 0, [1], 5.0, source=Part(2, 2), target=Part(0, 2))
    assert set(reasons(bench.side.poll()).values()) == {"layout"}
    assert bench.network.reads == []


def test_blocks_are_read_as_the_page_tells_of_them_and_the_last_look_comes_after_all(bench: Bench) -> None:
    page = bench.page("a", total=6)
    page.add([0], np.zeros((1, 0), np.uint64))
    bench.side.pull("a", bench.offer("a", told=1, total=6), 1, [10, 11, 12], 5.0)
    bench.side.poll()
    assert bench.read_blocks() == []
    page.add([41, 42], np.zeros((2, 0), np.uint64))
    bench.side.poll()
    assert bench.read_blocks() == [41, 42]
    bench.arrive()
    bench.now = 4.0
    assert bench.side.poll() == []
    page.add([7], np.zeros((1, 0), np.uint64))
    bench.side.poll()
    bench.now = 8.0
    assert bench.side.poll() == []
    looks = len(bench.network.reads)
    bench.arrive()
    assert reasons(bench.side.poll()) == {"a": "pulled"}
    assert len(bench.network.reads) == looks + 1
    assert bench.read_blocks() == [41, 42, 7]


def test_the_deadline_counts_from_the_last_block_that_was_told_of(bench: Bench) -> None:
    page = bench.page("a", total=3)
    bench.side.pull("a", bench.offer("a", told=0, total=3), 0, [1, 2, 3], 5.0)
    bench.now = 4.9
    page.add([5], np.zeros((1, 0), np.uint64))
    assert bench.side.poll() == []
    bench.arrive()
    bench.now = 9.8
    assert bench.side.poll() == []
    bench.now = 10.0
    (ended,) = bench.side.poll()
    assert isinstance(ended, PullFailed)
    assert (ended.reason, ended.detail) == ("timeout", "no progress within 5 s: 1 of 3 blocks were told of")


def test_a_page_that_is_read_half_written_is_read_again(bench: Bench) -> None:
    page = bench.page("a", total=2)
    page.add([5, 6], np.zeros((2, 0), np.uint64))
    memory = bench.network.pages.bytes
    memory[0] ^= 1
    bench.side.pull("a", bench.offer("a", told=0, total=2), 0, [1, 2], 5.0)
    assert bench.side.poll() == []
    assert bench.read_blocks() == []
    memory[0] ^= 1
    bench.side.poll()
    assert bench.read_blocks() == [5, 6]


def test_a_lease_granted_anew_is_not_the_one_whose_blocks_were_read(bench: Bench) -> None:
    bench.page("a", total=2).add([5], np.zeros((1, 0), np.uint64))
    bench.side.pull("a", bench.offer("a", told=0, total=2), 0, [1, 2], 5.0)
    bench.side.poll()
    bench.arrive()
    bench.network.table.end("a")
    bench.page("a", total=2).add([5, 6], np.zeros((2, 0), np.uint64))
    assert reasons(bench.side.poll()) == {"a": "expired"}


def test_blocks_that_come_after_the_ticket_cannot_be_had_without_a_page(bench: Bench) -> None:
    bench.network.table.grant("a", 1)
    bench.side.pull("a", bench.offer("a", told=1, total=2), 0, [1, 2], 5.0)
    bench.arrive()
    assert reasons(bench.side.poll()) == {"a": "io"}


@pytest.mark.parametrize(("changed", "how"), [(0, "pulled"), (1, "checksum")])
def test_what_arrived_is_summed_and_compared(changed: int, how: str) -> None:
    bench = Bench(parts=2)
    sums = sums_of([20, 21], range(2))
    sums[1, 1] += np.uint64(changed)
    bench.page("a", total=3).add([0, 1, 2], np.vstack([sums_of([9], range(2)), sums]))
    bench.side.pull("a", bench.offer("a", told=3, total=3), 1, [20, 21], 5.0)
    bench.arrive()
    (ended,) = bench.side.poll()
    assert reasons([ended]) == {"a": how}
    assert (bench.network.notices == ["peer"]) is (how == "pulled")
    if isinstance(ended, PullFailed):
        assert ended.detail == (
            "block 21, from block 2 of agent peer, sums up to 00000000000003fd, and 00000000000003fe was sent"
        )


def test_the_sums_may_come_after_the_blocks_on_either_side() -> None:
    bench = Bench(parts=1)
    page = bench.page("a", total=1)
    bench.side.pull("a", bench.offer("a", told=1, total=1), 0, [20], 5.0)
    bench.sums.hold = True
    bench.arrive()
    assert bench.side.poll() == []
    page.add([0], sums_of([20], [0]))
    assert bench.side.poll() == []
    ((waiting, sums),) = bench.sums.held
    waiting.set_result(sums)
    assert reasons(bench.side.poll()) == {"a": "pulled"}


def test_a_rank_of_two_reads_its_half_of_each_block_and_checks_it() -> None:
    half = BLOCK_BYTES // 2
    mine = KvRegion(1 << 41, half, 64)
    bench = Bench(parts=2, layout=HALVES, region=mine)
    # Of the sender's two sums the second is the part's; this rank sums its own blocks as one part.
    bench.page("a", total=2).add([0, 1], np.array([[1, 8], [1, 9]], dtype=np.uint64))
    offer = bench.offer("a", told=2, total=2)
    bench.side.pull("a", offer, 0, [8, 9], 5.0, source=Part(1, 2))
    (read,) = bench.network.blocks()
    assert read.local == [(mine.address + block * half, half, 0) for block in (8, 9)]
    assert read.remote == [(REGION.address + block * BLOCK_BYTES + half, half, 0) for block in (0, 1)]
    bench.arrive()
    (ended,) = bench.side.poll()
    assert isinstance(ended, Pulled), ended
    assert ended.bytes_moved == 2 * half


def test_sums_of_other_parts_than_are_pulled_are_not_compared() -> None:
    bench = Bench(parts=1, layout=HALVES, region=KvRegion(1 << 41, BLOCK_BYTES // 2, 64))
    bench.page("a", total=1).add([0], np.array([[123]], dtype=np.uint64))
    bench.side.pull("a", bench.offer("a", told=1, total=1), 0, [8], 5.0, source=Part(1, 2))
    bench.arrive()
    assert reasons(bench.side.poll()) == {"a": "pulled"}


def test_the_lease_table_is_what_receivers_take_it_for() -> None:
    assert np.dtype(leases.ENTRY).itemsize == 48
    assert leases.BUCKET_BYTES * leases.BUCKETS == leases.TABLE_BYTES
