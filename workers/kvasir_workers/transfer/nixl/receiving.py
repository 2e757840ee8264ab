"""The receiver side.

A pull reads the blocks, then the lease, then notifies the sender. If the sender had not computed all blocks
when it wrote the ticket, their ids are read from the lease's page as blocks complete. The last read of the
lease includes the page with the blocks' checksums, which the received bytes are compared with.

A pull's end is reported only when nothing can write to its target blocks any more, because the engine reuses
them at once. This is difficult because a posted read cannot be cancelled. Neither releasing the handle nor
dropping the peer stops it over TCP (measured: a sender that was stopped and continued filled memory seconds
after both). Only closing the receiving agent does; but a sender that has yet to answer a read over TCP ends
its process when it finds the reader gone (UCX aborts).

So where senders answer reads themselves, reads go into staging memory. A late pull fails at once and abandons
its reads; its sender gets no more reads until it has answered them. The agent is replaced only if too many
reads were abandoned, or if devices move the bytes without the sender, which is then not affected. It is
replaced when the healthy pulls have ended, which their own deadlines bound; the late pulls fail then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion, PullFailed, PullSucceeded
from kvasir_workers.transfer.common.checksums import BlockSums, known
from kvasir_workers.transfer.common.leases import LeaseState, refusal
from kvasir_workers.transfer.common.pulls import PullSpec, PullTimer, shape_of
from kvasir_workers.transfer.nixl import leases
from kvasir_workers.transfer.nixl.agent import NixlAgent, XferState
from kvasir_workers.transfer.nixl.landing import Landing
from kvasir_workers.transfer.nixl.pages import PageMemory, memory_bytes
from kvasir_workers.transfer.nixl.peers import Peers
from kvasir_workers.transfer.nixl.processes import Blocks, KernelRead, ProcessReads
from kvasir_workers.transfer.nixl.pulls import (
    LeaseReading,
    NixlPull,
    NixlRead,
    ReadHandle,
    check,
    descriptors,
    difference,
    learn,
    take_in,
)
from kvasir_workers.transfer.nixl.serving import PulledNotice

POLL_BUDGET_S = 0.002
POLL_PASSES = 4
MAX_PULLS = 1024
MAX_LEFT = MAX_PULLS // 2


class NixlReceiver:
    """Running pulls over one NIXL agent, which is replaced when a pull cannot be stopped otherwise. `sums`
    verifies received blocks; None disables verification. `by_kernel` reads senders that it reaches."""

    def __init__(
        self,
        make_agent: Callable[[], NixlAgent],
        regions: Sequence[KvRegion],
        layout: KvLayout,
        landing: Landing,
        sums: BlockSums | None,
        *,
        now: Callable[[], float],
        by_kernel: ProcessReads | None = None,
    ) -> None:
        self._make_agent = make_agent
        self._shape = shape_of(regions, layout)
        self._device = regions[0].device
        self._landing = landing
        self._sums = sums
        self._now = now
        self._by_kernel = by_kernel
        self._buckets: npt.NDArray[Any] = np.zeros((MAX_PULLS, leases.BUCKET_BYTES), dtype=np.uint8)
        self._pages = PageMemory(memory_bytes(regions[0].blocks, 2))
        self._slots = list(range(MAX_PULLS))
        self._pulls: dict[str, NixlPull] = {}
        self._left: list[NixlPull] = []
        self._peers = Peers()
        self._ended: list[PullSucceeded | PullFailed] = []
        self._fencing = False
        self._polls = self._steps = 0
        self._agent = self._start_agent()

    def pull(self, wanted: PullSpec) -> None:
        """Begin a pull. Errors are reported as PullFailed by `poll`. Raise TransferError only if a pull of
        this id is running."""
        if wanted.pull_id in self._pulls:
            raise TransferError(f"pull {wanted.pull_id} is under way already")
        if not self._slots:
            self._ended.append(wanted.failed("io", f"{MAX_PULLS} pulls are under way already"))
            return
        timer = PullTimer(wanted.timeout_s, self._now)
        try:
            endpoint, key = self._peers.endpoint(wanted.offer.endpoint)
            size = check(wanted, endpoint, self._shape)
            pull = NixlPull(wanted, endpoint, key, timer, size, self._slots[-1])
            if self._by_kernel is not None and self._by_kernel.reaches(endpoint.process, endpoint.leases):
                pull.process = endpoint.process
            learn(pull, wanted.offer.blocks)
        except TransferError as error:
            self._ended.append(wanted.failed("layout", error.message))
            return
        self._slots.pop()
        self._pulls[wanted.pull_id] = pull
        self._advance(pull, self._now() + POLL_BUDGET_S)

    def poll(self) -> list[PullSucceeded | PullFailed]:
        """Advance the pulls until none can advance. Return the pulls that ended."""
        self._polls += 1
        until = self._now() + POLL_BUDGET_S
        for _ in range(POLL_PASSES):
            before = self._steps
            for pull in list(self._pulls.values()):
                self._advance(pull, until)
            if self._steps == before:
                break
        self._end_left()
        self._fence_late()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> list[PullSucceeded | PullFailed]:
        """Fail the running pulls. Return the pulls that ended since the last poll."""
        self._agent.close()
        if self._by_kernel is not None:
            self._by_kernel.close()
        self._landing.close()
        if self._sums is not None:
            self._sums.close()
        for pull in list(self._pulls.values()):
            self._finish(pull, pull.wanted.failed("closed", "the receiving agent was closed"))
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, pull: NixlPull, until: float) -> None:
        if pull.failure is None and pull.timer.late:
            missing = (
                "" if pull.known else f": {len(pull.ids)} of {len(pull.wanted.targets)} blocks were told of"
            )
            pull.failure = ("timeout", f"{pull.timer.detail}{missing}")
        self._end_reads(pull, until)
        self._end_copies(pull)
        self._end_look(pull)
        try:
            if pull.failure is None:
                self._post_reads(pull, until)
            if pull.failure is None and pull.look is None and self._should_look(pull):
                self._begin_look(pull)
            if pull.failure is None and pull.arrived:
                self._judge(pull)
        except TransferError as error:
            self._peers.broke_off(pull.endpoint.agent)
            pull.failure = ("unreachable", error.message)
        if pull.failure is not None and not pull.copies and (self._landing.slots or not pull.in_flight):
            self._finish(pull, pull.wanted.failed(*pull.failure))

    def _end_reads(self, pull: NixlPull, until: float) -> None:
        """Start to copy completed reads while the rest is read."""
        running = []
        for read in pull.reads:
            if pull.failure is not None and isinstance(read.handle, KernelRead):
                read.handle.cancel()
            # Completing a read into the blocks themselves takes no time.
            waits = self._landing.slots and pull.failure is None and self._now() >= until
            if waits or self._settled(pull, read.handle) is None:
                running.append(read)
                continue
            self._steps += 1
            if pull.failure is None and isinstance(read.handle, KernelRead):
                pull.sums += [(read.rows, known(read.handle.sums()))] if self._checks(pull) else []
            elif pull.failure is None:
                copy = self._landing.copy_on(read.place, pull.wanted.targets[read.rows], pull.wanted.target)
                pull.copies.append((read, copy))
            else:
                self._landing.give(read.place)
        pull.reads = running

    def _end_copies(self, pull: NixlPull) -> None:
        """Start checksums of copied blocks."""
        copying = []
        for read, copy in pull.copies:
            if not copy.done():
                copying.append((read, copy))
                continue
            copy.result()
            self._steps += 1
            self._landing.give(read.place)
            if pull.failure is None and self._sums is not None and self._checks(pull):
                targets = pull.wanted.targets[read.rows]
                pull.sums.append((read.rows, self._sums.begin(targets, pull.sub_parts, pull.wanted.target)))
        pull.copies = copying

    def _end_left(self) -> None:
        """Free the resources of abandoned reads that have ended."""
        for pull in self._left:
            self._end_reads(pull, 0.0)
            self._end_look(pull)
            if not pull.in_flight:
                self._give_back(pull)
        self._left = [pull for pull in self._left if pull.in_flight]

    def _settled(self, pull: NixlPull, handle: ReadHandle) -> XferState | None:
        """Return how a read ended, or None while it runs. A read that failed, unless it was cancelled, fails
        the pull and marks the peer as broken."""
        if isinstance(handle, KernelRead):
            state, cancelled = handle.state, pull.failure is not None
        else:
            state, cancelled = self._agent.state(handle), False
            if state is not XferState.RUNNING:
                self._agent.release(handle)
        if state is XferState.RUNNING:
            return None
        if state is XferState.FAILED and not cancelled:
            self._peers.broke_off(pull.endpoint.agent)
            pull.failure = pull.failure or ("io", f"the connection to agent {pull.endpoint.agent} broke")
        return state

    def _post_reads(self, pull: NixlPull, until: float) -> None:
        if self._hangs(pull.endpoint.agent) or (self._fencing and not pull.in_flight):
            return
        while pull.batches:
            self._connect(pull)
            read = self._post(pull, pull.batches[0])
            if read is None:
                return
            pull.reads.append(read)
            pull.batches.popleft()
            if self._now() >= until:
                return

    def _post(self, pull: NixlPull, rows: slice) -> NixlRead | None:
        """Start a read; None if there is no target for it."""
        peer = pull.endpoint.agent
        place = self._landing.take(peer, pull.wanted.targets[rows], pull.wanted.target)
        if place is None:
            return None
        if self._by_kernel is not None and pull.process is not None:
            theirs = Blocks(pull.endpoint.regions, pull.ids[rows], pull.wanted.source)
            mine = Blocks(place.regions, place.targets, place.part)
            parts = pull.sub_parts if self._checks(pull) else 0
            return NixlRead(self._by_kernel.begin(pull.process, theirs, mine, parts), rows, place)
        try:
            handle = self._agent.read(peer, *descriptors(pull, rows, place), self._device)
        except TransferError:
            self._landing.give(place)
            raise
        return NixlRead(handle, rows, place)

    def _hangs(self, peer: str) -> bool:
        """Return whether a peer has abandoned reads to answer."""
        return any(pull.endpoint.agent == peer for pull in self._left)

    def _should_look(self, pull: NixlPull) -> bool:
        """Return whether to read the lease: after the last byte; for missing ids; and once beside the blocks
        to learn the page's place, which saves a second read at the end. Once per poll, unless the last read
        brought progress."""
        if pull.looked_in == self._polls or self._hangs(pull.endpoint.agent):
            return False
        if pull.arrived:
            return not pull.good and not (self._fencing and not pull.wanted.targets)
        if self._fencing:
            return False
        return not pull.known or (self._checks(pull) and not pull.grant)

    def _begin_look(self, pull: NixlPull) -> None:
        self._connect(pull)
        bucket = self._buckets[pull.slot]
        bucket[:] = 0
        local = [(int(bucket.ctypes.data), leases.BUCKET_BYTES, 0)]
        remote = [
            (pull.endpoint.leases + leases.bucket_offset(pull.wanted.offer.lease_id), leases.BUCKET_BYTES, 0)
        ]
        if pull.page is not None and pull.place is None:
            pull.place = self._pages.take(pull.page.size)
        if pull.page is not None and pull.place is not None:
            local.append((self._pages.address + pull.place.offset, pull.place.size, 0))
            remote.append((pull.endpoint.pages + pull.page.offset, pull.page.size, 0))
        mine, theirs = np.array(local, dtype=np.uint64), np.array(remote, dtype=np.uint64)
        handle: ReadHandle
        if self._by_kernel is not None and pull.process is not None:
            handle = self._by_kernel.read(pull.process, mine, theirs)
        else:
            handle = self._agent.read(pull.endpoint.agent, mine, theirs, "cpu")
        pull.looked_in = self._polls
        self._steps += 1
        pull.look = LeaseReading(handle, pull.page if pull.place is not None else None, pull.arrived)

    def _end_look(self, pull: NixlPull) -> None:
        look = pull.look
        if look is None or self._settled(pull, look.handle) is None:
            return
        pull.look = None
        if pull.failure is not None:
            return
        found = leases.look_up(
            self._buckets[pull.slot].tobytes(), pull.wanted.offer.lease_id, pull.wanted.offer.fence
        )
        granted_again = pull.grant and found.grant != pull.grant
        if found.state in {LeaseState.FENCED, LeaseState.ENDED} or granted_again:
            pull.failure = refusal(found.state, pull.wanted.offer.lease_id)
        elif found.state is LeaseState.LIVE:
            before = pull.page, len(pull.ids), pull.good
            take_in(pull, look, found, self._pages)
            if before != (pull.page, len(pull.ids), pull.good):
                pull.looked_in = -1
        # An absent lease is looked up again until the deadline: a ticket may arrive before its offer is made.

    def _judge(self, pull: NixlPull) -> None:
        """End a pull whose bytes have arrived, if the lease was live afterwards and the checksums agree."""
        if not pull.good:
            return
        if pull.theirs is not None:
            if not all(sums.done() for _, sums in pull.sums):
                return
            for rows, sums in pull.sums:
                differs = difference(pull, rows, sums.result(), pull.theirs)
                if differs:
                    pull.failure = ("checksum", differs)
                    return
        notice = PulledNotice.signed(pull.wanted.offer, pull.wanted.reader, pull.key)
        self._agent.notify(pull.endpoint.agent, msgspec.msgpack.encode(notice))
        self._finish(pull, pull.wanted.succeeded(pull.block_bytes, pull.timer.seconds))

    def _checks(self, pull: NixlPull) -> bool:
        return self._sums is not None and pull.sub_parts > 0 and bool(pull.wanted.targets)

    def _finish(self, pull: NixlPull, event: PullSucceeded | PullFailed) -> None:
        del self._pulls[pull.wanted.pull_id]
        if pull.in_flight:
            self._left.append(pull)
        else:
            self._give_back(pull)
        self._ended.append(event)
        self._steps += 1

    def _give_back(self, pull: NixlPull) -> None:
        self._slots.append(pull.slot)
        if pull.place is not None:
            self._pages.give(pull.place)

    def _fence_late(self) -> None:
        """Replace the agent if reads cannot be abandoned, or too many were, once no other pull has reads."""
        if slots := self._landing.slots:
            late = []
            lost = sum(len(pull.reads) for pull in self._left)
            self._fencing = lost >= slots or len(self._left) >= MAX_LEFT
        else:
            late = [p for p in self._pulls.values() if p.in_flight and p.timer.late and p.process is None]
            self._fencing = bool(late)
        if not self._fencing or any(p.in_flight and p not in late for p in self._pulls.values()):
            return
        self._agent.close()
        self._peers.clear()
        for pull in late:
            self._finish(pull, pull.wanted.failed(*(pull.failure or ("timeout", ""))))
        for pull in self._left:
            for read in pull.reads:
                self._landing.give(read.place)
            self._give_back(pull)
        self._left.clear()
        self._agent = self._start_agent()
        self._fencing = False

    def _connect(self, pull: NixlPull) -> None:
        pulls = (*self._pulls.values(), *self._left)
        self._peers.connect(self._agent, pull.endpoint, {p.endpoint.agent for p in pulls if p.in_flight})

    def _start_agent(self) -> NixlAgent:
        agent = self._make_agent()
        agent.register(self._landing.memory(), self._device)
        scratch = (int(self._buckets.ctypes.data), self._buckets.nbytes, 0)
        agent.register([scratch, (self._pages.address, len(self._pages.bytes), 0)], "cpu")
        return agent
