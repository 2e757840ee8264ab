"""The pulling side over an agent made of lists: what the network does is decided by the test."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion, Offer, Pulled, PullFailed
from kvasir_workers.transfer.nixl import endpoint, leases, receiving
from kvasir_workers.transfer.nixl.agent import Descriptor, NixlAgent, XferState
from kvasir_workers.transfer.nixl.leases import LeaseTable
from kvasir_workers.transfer.nixl.receiving import ReceivingSide

BLOCK_BYTES = 1 << 20
LAYOUT = KvLayout(32, "float32", "axes-0123", 1, 4, 32, BLOCK_BYTES)
REGION = KvRegion(1 << 40, BLOCK_BYTES, 64)


@dataclass
class Read:
    """A read that was posted; the test moves its state."""

    peer: str
    local: list[Descriptor]
    remote: list[Descriptor]
    state: XferState = XferState.RUNNING


@dataclass
class Network:
    """Every agent ever made, every read ever posted. `table` answers reads of leases at once."""

    table: LeaseTable = field(default_factory=LeaseTable)
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

    def read(self, peer: str, local: Sequence[Descriptor], remote: Sequence[Descriptor], device: str) -> int:
        assert peer in self.peers
        read = Read(peer, list(local), list(remote))
        if local[0][1] == leases.BUCKET_BYTES and self._network.answers_lease_reads:
            ctypes.memmove(local[0][0], remote[0][0], leases.BUCKET_BYTES)
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


class Bench:
    """A receiving side on a fake network; `now` is the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.network = Network()
        self.side = ReceivingSide(self.network.make_agent, [REGION], LAYOUT, lambda: self.now)

    def offer(self, lease_id: str, peer: str = "peer", metadata: bytes = b"") -> Offer:
        text = endpoint.encode(peer, metadata, (REGION,), self.network.table.address, LAYOUT)
        return Offer(lease_id, 1, 60.0, tuple(range(64)), text)

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
        self.side.pull(lease_id, self.offer(lease_id, peer), range(blocks), range(blocks), timeout_s)


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
    assert sizes == [receiving.BATCH_BYTES] * 5
    assert [d for read in bench.network.blocks() for d in read.local] == [
        (REGION.address + i * receiving.BATCH_BYTES, receiving.BATCH_BYTES, 0) for i in range(5)
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
    bench.side.pull("a", bench.offer("a", "gone", b"unreachable"), [1], [1], 5.0)
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
        bench.side.pull(f"{number}", bench.offer("unknown"), [], [], 5.0)
    assert reasons(bench.side.poll()) == {f"{receiving.MAX_PULLS}": "io"}


def test_a_pull_id_under_way_cannot_be_used_again(bench: Bench) -> None:
    bench.pull("a")
    with pytest.raises(TransferError, match="under way already"):
        bench.pull("a", grant=False)


def test_a_target_outside_memory_is_refused(bench: Bench) -> None:
    bench.side.pull("a", bench.offer("a"), [1], [64], 5.0)
    bench.side.pull("b", bench.offer("b"), [1, 2], [1], 5.0)
    assert reasons(bench.side.poll()) == {"a": "layout", "b": "layout"}


def test_the_lease_table_is_what_receivers_take_it_for() -> None:
    assert np.dtype(leases.ENTRY).itemsize == 32
    assert leases.BUCKET_BYTES * leases.BUCKETS == leases.TABLE_BYTES
