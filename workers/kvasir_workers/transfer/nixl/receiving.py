"""The pulling side.

A pull reads the blocks, then the lease, then tells the sender. Where the sender had not computed all blocks
when it wrote the ticket, their ids are read from the lease's page as they come. With the lease's last reading
comes the page that holds the blocks' sums, against which what arrived is summed.

A pull's end is reported only when nothing can write to its target blocks any more, because the engine reuses
them at once. That is the hard part: a read that was posted cannot be called back. Neither releasing the
handle nor dropping the peer stops it over TCP (measured: a sender that was stopped and continued filled
memory seconds after both); only closing the receiving agent does. So a pull that is late waits until the
healthy pulls are through, which their own deadlines bound, then the agent is replaced and the late pull
fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import WHOLE, KvRegion, Offer, Part, Pulled, PullFailed
from kvasir_workers.transfer.checksums import BlockSums, Sums, first_difference
from kvasir_workers.transfer.nixl import leases
from kvasir_workers.transfer.nixl.agent import NixlAgent, XferState
from kvasir_workers.transfer.nixl.endpoint import Endpoint, decode
from kvasir_workers.transfer.nixl.leases import Found, LeaseState
from kvasir_workers.transfer.nixl.pages import Page, PageMemory, memory_bytes, page_bytes, parse
from kvasir_workers.transfer.nixl.pulls import Look, Pull, batches, check_fits, outside, whole
from kvasir_workers.transfer.nixl.serving import PulledNotice

POLL_BUDGET_S = 0.002
POLL_PASSES = 4
MAX_PEERS = 256
MAX_PULLS = 1024


class ReceivingSide:
    """Pulls under way over one NIXL agent, which is replaced when a pull cannot be stopped otherwise. `sums`
    is what to check with, None not to."""

    def __init__(
        self,
        make_agent: Callable[[], NixlAgent],
        regions: Sequence[KvRegion],
        layout: KvLayout,
        sums: BlockSums | None,
        now: Callable[[], float],
    ) -> None:
        self._make_agent = make_agent
        self._regions = tuple(regions)
        self._device = regions[0].device
        self._layout = layout
        self._sums = sums
        self._now = now
        self._buckets: npt.NDArray[Any] = np.zeros((MAX_PULLS, leases.BUCKET_BYTES), dtype=np.uint8)
        self._pages = PageMemory(memory_bytes(regions[0].blocks, 2))
        self._slots = list(range(MAX_PULLS))
        self._pulls: dict[str, Pull] = {}
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._endpoints: OrderedDict[str, Endpoint] = OrderedDict()
        self._broken: set[str] = set()
        self._ended: list[Pulled | PullFailed] = []
        self._fencing = False
        self._polls = self._steps = 0
        self._agent = self._start_agent()

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        targets: Sequence[int],
        timeout_s: float,
        *,
        source: Part = WHOLE,
        target: Part = WHOLE,
    ) -> None:
        """Begin a pull. What is wrong with it comes as PullFailed from poll(); raises TransferError
        only for a pull_id that is under way."""
        if pull_id in self._pulls:
            raise TransferError(f"pull {pull_id} is under way already")
        if not self._slots:
            self._ended.append(PullFailed(pull_id, "io", f"{MAX_PULLS} pulls are under way already"))
            return
        now = self._now()
        try:
            endpoint = self._endpoint(offer.endpoint)
            pull = Pull(
                pull_id,
                offer,
                endpoint,
                first,
                tuple(targets),
                source,
                target,
                timeout_s,
                started_s=now,
                deadline_s=now + timeout_s,
                slot=self._slots[-1],
            )
            check_fits(pull, self._regions, self._layout)
            self._learn(pull, offer.blocks)
        except TransferError as error:
            self._ended.append(PullFailed(pull_id, "layout", error.message))
            return
        self._slots.pop()
        self._pulls[pull_id] = pull
        self._advance(pull, now + POLL_BUDGET_S)

    def poll(self) -> list[Pulled | PullFailed]:
        """Progress every pull while there is something to progress; those that ended."""
        self._polls += 1
        post_until = self._now() + POLL_BUDGET_S
        for _ in range(POLL_PASSES):
            before = self._steps
            for pull in list(self._pulls.values()):
                self._advance(pull, post_until)
            if self._steps == before:
                break
        self._fence_late()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> list[Pulled | PullFailed]:
        """Fail what is left; the pulls that ended since the last poll."""
        self._agent.close()
        if self._sums is not None:
            self._sums.close()
        for pull in list(self._pulls.values()):
            self._finish(pull, PullFailed(pull.pull_id, "closed", "the receiving agent was closed"))
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, pull: Pull, post_until: float) -> None:
        if pull.failure is None and self._now() >= pull.deadline_s:
            missing = "" if pull.known else f": {len(pull.ids)} of {len(pull.targets)} blocks were told of"
            pull.failure = ("timeout", f"no progress within {pull.timeout_s:g} s{missing}")
        self._end_reads(pull)
        self._end_look(pull)
        try:
            if pull.failure is None:
                self._post_reads(pull, post_until)
            if pull.failure is None and pull.look is None and self._should_look(pull):
                self._begin_look(pull)
            if pull.failure is None and pull.arrived:
                self._judge(pull)
        except TransferError as error:
            self._broken.add(pull.endpoint.agent)
            pull.failure = ("unreachable", error.message)
        if pull.failure is not None and not pull.in_flight:
            self._finish(pull, PullFailed(pull.pull_id, *pull.failure))

    def _end_reads(self, pull: Pull) -> None:
        """Sum what has arrived while the rest is read."""
        running = []
        for handle, rows in pull.reads:
            if self._settled(pull, handle) is None:
                running.append((handle, rows))
                continue
            self._steps += 1
            if pull.failure is None and self._sums is not None and self._checks(pull):
                targets = pull.targets[rows]
                pull.sums.append((rows, self._sums.begin(targets, pull.sub_parts, pull.target)))
        pull.reads = running

    def _settled(self, pull: Pull, handle: int) -> XferState | None:
        """How a read ended, or None while it runs. A failed one marks the pull and the peer."""
        state = self._agent.state(handle)
        if state is XferState.RUNNING:
            return None
        self._agent.release(handle)
        if state is XferState.FAILED:
            self._broken.add(pull.endpoint.agent)
            pull.failure = pull.failure or ("io", f"agent {pull.endpoint.agent} broke off")
        return state

    def _post_reads(self, pull: Pull, post_until: float) -> None:
        if self._fencing and not pull.in_flight:
            return
        while pull.batches:
            batch = pull.batches[0]
            self._connect(pull.endpoint)
            handle = self._agent.read(pull.endpoint.agent, batch.local, batch.remote, self._device)
            pull.reads.append((handle, batch.rows))
            pull.batches.popleft()
            if self._now() >= post_until:
                return

    def _should_look(self, pull: Pull) -> bool:
        """After the last byte; for ids that are missing; and once beside the blocks to learn where the page
        is, which spares the last look a second one. Once in a poll, unless that brought something."""
        if pull.looked_in == self._polls:
            return False
        if pull.arrived:
            return not pull.good and not (self._fencing and not pull.targets)
        if self._fencing:
            return False
        return not pull.known or (self._checks(pull) and not pull.grant)

    def _begin_look(self, pull: Pull) -> None:
        self._connect(pull.endpoint)
        bucket = self._buckets[pull.slot]
        bucket[:] = 0
        local = [(int(bucket.ctypes.data), leases.BUCKET_BYTES, 0)]
        remote = [(pull.endpoint.leases + leases.bucket_offset(pull.offer.lease_id), leases.BUCKET_BYTES, 0)]
        if pull.page is not None and pull.place is None:
            pull.place = self._pages.take(pull.page.size)
        if pull.page is not None and pull.place is not None:
            local.append((self._pages.address + pull.place.offset, pull.place.size, 0))
            remote.append((pull.endpoint.pages + pull.page.offset, pull.page.size, 0))
        mine, theirs = np.array(local, dtype=np.uint64), np.array(remote, dtype=np.uint64)
        handle = self._agent.read(pull.endpoint.agent, mine, theirs, "cpu")
        pull.looked_in = self._polls
        self._steps += 1
        pull.look = Look(handle, pull.page if pull.place is not None else None, pull.arrived)

    def _end_look(self, pull: Pull) -> None:
        look = pull.look
        if look is None or self._settled(pull, look.handle) is None:
            return
        pull.look = None
        if pull.failure is not None:
            return
        found = leases.look_up(self._buckets[pull.slot].tobytes(), pull.offer.lease_id, pull.offer.fence)
        if found.state is LeaseState.FENCED:
            pull.failure = ("fenced", f"lease {pull.offer.lease_id} is held under another fence")
        elif found.state is LeaseState.ENDED or (pull.grant and found.grant != pull.grant):
            pull.failure = ("expired", f"lease {pull.offer.lease_id} has ended")
        elif found.state is LeaseState.LIVE:
            before = pull.page, len(pull.ids), pull.good
            self._take_in(pull, look, found)
            if before != (pull.page, len(pull.ids), pull.good):
                pull.looked_in = -1
        # An absent lease is looked up again until the deadline: a ticket may overtake its offer.

    def _take_in(self, pull: Pull, look: Look, found: Found) -> None:
        """What a look at a live lease says."""
        pull.grant = found.grant
        if found.page is None:
            pull.good = look.last
            if not pull.known:
                pull.failure = ("io", "the sender had no room to tell of blocks that came after the ticket")
            return
        size = page_bytes(pull.offer.total, pull.endpoint.parts)
        if found.page.size != size or found.page.offset + size > pull.endpoint.page_bytes:
            pull.failure = ("layout", f"the lease's page of {found.page.size} bytes is not one of {size}")
            return
        pull.page = found.page
        if look.page is None or pull.place is None:
            return
        page = parse(self._pages.view(pull.place), pull.offer.lease_id, pull.offer.fence)
        if page is None:
            return
        try:
            self._learn(pull, page.ids)
        except TransferError as error:
            pull.failure = ("layout", error.message)
            return
        if look.last and len(page.ids) >= pull.first + len(pull.targets):
            pull.good, pull.theirs = True, page

    def _learn(self, pull: Pull, ids: Sequence[int]) -> None:
        """Ids of the lease's first blocks: those that are wanted and were not known are to be read. Raises
        TransferError for ids that cannot be."""
        wanted = list(ids[pull.first : pull.first + len(pull.targets)])
        fresh = wanted[len(pull.ids) :]
        if wanted[: len(pull.ids)] != pull.ids[: len(wanted)]:
            raise TransferError("the lease's blocks are not those of its ticket")
        if outside(fresh, pull.endpoint.regions):
            raise TransferError("the offer names blocks outside the offering side's memory")
        if fresh:
            pull.ids += fresh
            pull.batches.extend(batches(pull, self._regions, len(pull.ids) - len(fresh)))
            pull.deadline_s = self._now() + pull.timeout_s

    def _judge(self, pull: Pull) -> None:
        """End a pull whose bytes have arrived, if its lease was good afterwards and the sums agree."""
        if not pull.good:
            return
        if pull.theirs is not None:
            if not all(sums.done() for _, sums in pull.sums):
                return
            for rows, sums in pull.sums:
                self._compare(pull, rows, sums.result(), pull.theirs)
        if pull.failure is not None:
            return
        notice = PulledNotice(pull.offer.lease_id, pull.offer.fence, pull.source.index, pull.source.of)
        self._agent.notify(pull.endpoint.agent, msgspec.msgpack.encode(notice))
        size = sum(region.block_bytes // pull.target.of for region in self._regions)
        seconds = self._now() - pull.started_s
        self._finish(pull, Pulled(pull.pull_id, len(pull.targets) * size, seconds))

    def _compare(self, pull: Pull, rows: slice, mine: Sums, page: Page) -> None:
        sent = page.sums[pull.first + rows.start : pull.first + rows.stop]
        columns = slice(pull.source.index * pull.sub_parts, (pull.source.index + 1) * pull.sub_parts)
        differ = first_difference(mine, sent[:, columns])
        if differ is not None and pull.failure is None:
            row, found, expected = differ
            block, theirs = pull.targets[rows][row], pull.ids[rows][row]
            pull.failure = (
                "checksum",
                f"block {block}, from block {theirs} of agent {pull.endpoint.agent}, sums up to "
                f"{found:016x}, and {expected:016x} was sent",
            )

    def _checks(self, pull: Pull) -> bool:
        return self._sums is not None and pull.sub_parts > 0 and bool(pull.targets)

    def _finish(self, pull: Pull, event: Pulled | PullFailed) -> None:
        del self._pulls[pull.pull_id]
        self._slots.append(pull.slot)
        if pull.place is not None:
            self._pages.give(pull.place)
        self._ended.append(event)
        self._steps += 1

    def _fence_late(self) -> None:
        late = [p for p in self._pulls.values() if p.in_flight and self._now() >= p.deadline_s]
        self._fencing = bool(late)
        if not late or any(p.in_flight and p not in late for p in self._pulls.values()):
            return
        self._agent.close()
        self._peers.clear()
        self._broken.clear()
        self._agent = self._start_agent()
        self._fencing = False
        for pull in late:
            reason, detail = pull.failure or ("timeout", "")
            self._finish(pull, PullFailed(pull.pull_id, reason, detail))

    def _endpoint(self, text: str) -> Endpoint:
        """Decoded once, since every ticket of an engine carries it. Raises TransferError."""
        found = self._endpoints.pop(text, None) or decode(text)
        self._endpoints[text] = found
        if len(self._endpoints) > MAX_PEERS:
            self._endpoints.popitem(last=False)
        return found

    def _connect(self, endpoint: Endpoint) -> None:
        peer = endpoint.agent
        if peer in self._broken:
            if any(p.in_flight and p.endpoint.agent == peer for p in self._pulls.values()):
                raise TransferError(f"agent {peer} is broken off")
            self._forget(peer)
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return
        while len(self._peers) >= MAX_PEERS:
            busy = {p.endpoint.agent for p in self._pulls.values() if p.in_flight}
            self._forget(next(name for name in self._peers if name not in busy))
        self._agent.add_peer(endpoint.metadata, peer)
        self._peers[peer] = None

    def _forget(self, peer: str) -> None:
        self._broken.discard(peer)
        if peer in self._peers:
            del self._peers[peer]
            self._agent.forget_peer(peer)

    def _start_agent(self) -> NixlAgent:
        agent = self._make_agent()
        agent.register([whole(region) for region in self._regions], self._device)
        scratch = (int(self._buckets.ctypes.data), self._buckets.nbytes, 0)
        agent.register([scratch, (self._pages.address, len(self._pages.bytes), 0)], "cpu")
        return agent
