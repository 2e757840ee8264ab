"""The pulling side of NIXL transfers over a fake agent made of lists; the test controls the network."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion, Offer, PullFailed, PullSucceeded
from kvasir_workers.transfer.common.checksums import Sums
from kvasir_workers.transfer.common.lease_keys import issue, seal
from kvasir_workers.transfer.common.pulls import PullSpec
from kvasir_workers.transfer.nixl import endpoint, leases
from kvasir_workers.transfer.nixl.agent import Descriptor, Descriptors, NixlAgent, XferState
from kvasir_workers.transfer.nixl.endpoint import NixlEndpoint
from kvasir_workers.transfer.nixl.landing import DirectLanding, Landing
from kvasir_workers.transfer.nixl.leases import NixlLeaseTable
from kvasir_workers.transfer.nixl.pages import PageMemory, PageWriter, page_bytes
from kvasir_workers.transfer.nixl.processes import Blocks, KernelRead, ProcessId, ProcessReads
from kvasir_workers.transfer.nixl.receiving import NixlReceiver

BLOCK_BYTES = 1 << 20
SECRET = b"s" * 32
LAYOUT = KvLayout(32, "float32", "BHNC", 1, 4, 32, BLOCK_BYTES)
REGION = KvRegion(1 << 40, BLOCK_BYTES, 64)
HALVES = replace(LAYOUT, kv_heads=2, bytes_per_block=BLOCK_BYTES // 2, tensor_parallel_size=2)
"""The KV of one of two ranks."""


@dataclass
class Read:
    """A posted read; the test changes its state."""

    peer: str
    local: list[Descriptor]
    remote: list[Descriptor]
    state: XferState = XferState.RUNNING


def tuples(rows: Descriptors) -> list[Descriptor]:
    return [(int(address), int(length), int(device)) for address, length, device in rows]


@dataclass
class Network:
    """All agents and all posted reads. `table` and `pages` answer reads of leases at once."""

    table: NixlLeaseTable = field(default_factory=NixlLeaseTable)
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
    """Checksums with known values: the parts of block n have n, n + 1000, n + 2000, …"""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Sums], Sums]] = []
        self.hold = False

    def begin(self, blocks: Sequence[int], parts: int, part: BlockPart = UNSHARDED) -> Future[Sums]:
        found: Future[Sums] = Future()
        sums = sums_of(blocks, range(parts))
        if self.hold:
            self.held.append((found, sums))
        else:
            found.set_result(sums)
        return found

    def close(self) -> None:
        self.held.clear()


class ScriptedRead(KernelRead):
    """A read by the kernel; the test ends it."""

    def __init__(self, targets: Sequence[int], parts: int) -> None:
        self.ended = XferState.RUNNING
        self.cancelled = False
        self._found = sums_of(targets, range(parts))

    @property
    def state(self) -> XferState:
        return self.ended

    def cancel(self) -> None:
        self.cancelled = True

    def sums(self) -> Sums:
        return self._found


class ScriptedKernel(ProcessReads):
    """Reads leases at once, and blocks when the test says so; `refuses`: reaches nobody."""

    def __init__(self) -> None:
        self.reads: list[ScriptedRead] = []
        self.refuses = self.gone = self.closed = False

    def reaches(self, process: ProcessId | None, address: int) -> bool:
        return process is not None and not self.refuses

    def read(self, process: ProcessId, local: Descriptors, remote: Descriptors) -> KernelRead:
        read = ScriptedRead((), 0)
        read.ended = XferState.FAILED if self.gone else XferState.DONE
        for (mine, size, _), (theirs, _, _) in zip(tuples(local), tuples(remote), strict=True):
            if not self.gone:
                ctypes.memmove(mine, theirs, size)
        return read

    def begin(self, process: ProcessId, theirs: Blocks, mine: Blocks, parts: int) -> KernelRead:
        self.reads.append(ScriptedRead(mine.ids, parts))
        return self.reads[-1]

    def close(self) -> None:
        self.closed = True


def sums_of(blocks: Sequence[int], parts: Sequence[int]) -> Sums:
    return np.array([[block + 1000 * part for part in parts] for block in blocks], dtype=np.uint64)


class PullingSide:
    """A NixlReceiver whose pulls have the arguments of the port."""

    def __init__(self, receiver: NixlReceiver) -> None:
        self.poll, self.close = receiver.poll, receiver.close
        self._receiver = receiver

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        targets: Sequence[int],
        timeout_s: float,
        *,
        source: BlockPart = UNSHARDED,
        target: BlockPart = UNSHARDED,
    ) -> None:
        spec = PullSpec(pull_id, offer, first, tuple(targets), source, target, source, timeout_s)
        self._receiver.pull(spec)


class Bench:
    """A receiving side on a fake network; `now` is the clock. The sender has `parts` checksums per block."""

    lands: Callable[[Sequence[KvRegion]], Landing] = DirectLanding

    def __init__(
        self,
        parts: int = 0,
        layout: KvLayout = LAYOUT,
        region: KvRegion = REGION,
        *,
        kernel: ScriptedKernel | None = None,
    ) -> None:
        self.now = 0.0
        self.parts = parts
        self.network = Network()
        self.sums = ScriptedSums()
        receiver = NixlReceiver(
            self.network.make_agent,
            [region],
            layout,
            self.lands([region]),
            self.sums,
            now=lambda: self.now,
            by_kernel=kernel,
        )
        self.side = PullingSide(receiver)

    def offer(
        self,
        lease_id: str,
        peer: str = "peer",
        metadata: bytes = b"",
        *,
        known_blocks: int = 64,
        total: int = 64,
    ) -> Offer:
        network = self.network
        table, pages = network.table.address, network.pages
        packed = endpoint.encode(
            NixlEndpoint(
                endpoint.VERSION,
                peer,
                metadata,
                (REGION,),
                table,
                pages.address,
                len(pages.bytes),
                self.parts,
                LAYOUT,
                ProcessId("machine", 1),
            )
        )
        text = issue(seal(packed, [SECRET]), lease_id, 1)
        return Offer(lease_id, 1, 60.0, tuple(range(known_blocks)), total, text)

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
        """Complete every running read of blocks."""
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


def reasons(ended: Sequence[PullSucceeded | PullFailed]) -> dict[str, str]:
    return {each.pull_id: each.reason if isinstance(each, PullFailed) else "pulled" for each in ended}
