"""The state of one pull on the receiver side: its arguments, its progress, and the source and target of each
read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import BlockPart, KvRegion
from kvasir_workers.transfer.common.checksums import PendingSums, Sums, describe_difference
from kvasir_workers.transfer.common.pulls import KvShape, PullSpec, PullTimer, check_fits, shape_of
from kvasir_workers.transfer.nixl.agent import Descriptors, device_ordinal
from kvasir_workers.transfer.nixl.endpoint import NixlEndpoint
from kvasir_workers.transfer.nixl.landing import BATCH_BYTES, ReadTarget
from kvasir_workers.transfer.nixl.leases import Extent, TableEntry
from kvasir_workers.transfer.nixl.pages import MAX_PAGE_BYTES, Page, PageMemory, page_bytes, parse
from kvasir_workers.transfer.nixl.processes import KernelRead, ProcessId
from kvasir_workers.transfer.nixl.runs import Numbers, Runs, merge

ReadHandle = int | KernelRead
"""Of the agent, or of the kernel."""


@dataclass(frozen=True, slots=True)
class NixlRead:
    """A read of the pull's blocks number `rows`, all layers, into `place`."""

    handle: ReadHandle
    rows: slice
    place: ReadTarget


@dataclass(frozen=True, slots=True)
class LeaseReading:
    """A read of the lease and, if its place was known, of its page. `last`: started after the last byte had
    arrived."""

    handle: ReadHandle
    page: Extent | None
    last: bool


@dataclass(slots=True)
class NixlPull:
    """`key` is that of the lease. `ids` are the known source blocks, for the first of `targets`. `page` is
    the location of the lease's page at the sender, `place` the local copy; `looked_in` is the poll of the
    last lease read. `batches` are rows still to be read; `copies` are completed reads that are being copied
    to the blocks. `process` is the sender's, if the kernel reads it."""

    wanted: PullSpec
    endpoint: NixlEndpoint
    key: bytes
    timer: PullTimer
    block_bytes: int
    slot: int
    process: ProcessId | None = None
    ids: list[int] = field(default_factory=list)
    batches: deque[slice] = field(default_factory=deque)
    reads: list[NixlRead] = field(default_factory=list)
    copies: list[tuple[NixlRead, Future[None]]] = field(default_factory=list)
    look: LeaseReading | None = None
    looked_in: int = -1
    grant: int = 0
    page: Extent | None = None
    place: Extent | None = None
    sums: list[tuple[slice, PendingSums]] = field(default_factory=list)
    good: bool = False
    theirs: Page | None = None
    failure: tuple[str, str] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a read may still write for this pull."""
        return bool(self.reads) or self.look is not None

    @property
    def known(self) -> bool:
        """Whether every block's id is known."""
        return len(self.ids) == len(self.wanted.targets)

    @property
    def arrived(self) -> bool:
        """Whether the last byte is in its block."""
        return self.known and not (self.batches or self.reads or self.copies)

    @property
    def sub_parts(self) -> int:
        """Number of the sender's checksums for the pulled part of a block; 0 if they do not divide evenly."""
        parts = self.endpoint.parts
        return 0 if parts % self.wanted.source.of else parts // self.wanted.source.of


def check(wanted: PullSpec, endpoint: NixlEndpoint, shape: KvShape) -> int:
    """Return the bytes of a target block's part over all regions. Raise TransferError if the pull does not
    fit."""
    size = check_fits(wanted, shape, shape_of(endpoint.regions, endpoint.layout), endpoint.agent)
    offer = wanted.offer
    if page_bytes(offer.total, endpoint.parts) > MAX_PAGE_BYTES and not offer.blocks:
        raise TransferError(f"an offer of {offer.total} blocks is too large")
    return size


def learn(pull: NixlPull, ids: Sequence[int]) -> None:
    """Record the ids of the lease's first blocks, and queue reads of those that are wanted and were not
    known. A read covers all layers of its blocks, so that they can be summed while the next are read, and
    about BATCH_BYTES. Raise TransferError for invalid ids."""
    first = pull.wanted.first
    wanted = list(ids[first : first + len(pull.wanted.targets)])
    begin = len(pull.ids)
    if wanted[:begin] != pull.ids[: len(wanted)]:
        raise TransferError("the lease's blocks differ from those of its ticket")
    if _outside(wanted[begin:], pull.endpoint.regions):
        raise TransferError("the offer has blocks outside the sender's memory")
    if len(wanted) > begin:
        pull.ids = wanted
        step = max(1, BATCH_BYTES // pull.block_bytes)
        edges = range(begin, len(wanted), step)
        pull.batches.extend(slice(at, min(at + step, len(wanted))) for at in edges)
        pull.timer.restart()


def take_in(pull: NixlPull, look: LeaseReading, found: TableEntry, pages: PageMemory) -> None:
    """Process the entry of a live lease, and its page in `pages` if it was read."""
    pull.grant = found.grant
    if found.page is None:
        pull.good = look.last
        if not pull.known:
            pull.failure = ("io", "the sender had no page for blocks completed after the ticket")
        return
    size = page_bytes(pull.wanted.offer.total, pull.endpoint.parts)
    if found.page.size != size or found.page.offset + size > pull.endpoint.page_bytes:
        pull.failure = ("layout", f"the lease's page has {found.page.size} bytes, not {size}")
        return
    pull.page = found.page
    if look.page is None or pull.place is None:
        return
    page = parse(pages.view(pull.place), pull.wanted.offer.lease_id, pull.wanted.offer.fence)
    if page is None:
        return
    if page.total != pull.wanted.offer.total:
        pull.failure = ("layout", f"the lease has {page.total} blocks, not {pull.wanted.offer.total}")
        return
    try:
        learn(pull, page.ids)
    except TransferError as error:
        pull.failure = ("layout", error.message)
        return
    if look.last and len(page.ids) >= pull.wanted.first + len(pull.wanted.targets):
        pull.good, pull.theirs = True, page


def descriptors(pull: NixlPull, rows: slice, place: ReadTarget) -> tuple[Descriptors, Descriptors]:
    """Return the descriptors of `place` and of the sender's memory, pairwise, for a read of the pull's blocks
    number `rows`. Neighbouring blocks share one descriptor."""
    ids, part = pull.ids[rows], place.part
    if pull.wanted.source.of > 1 or part.of > 1:  # parts of neighbouring blocks are not contiguous
        runs = Runs(np.array(ids), np.array(place.targets), np.ones(len(ids), dtype=np.int64))
    else:
        runs = merge(ids, place.targets)
    pairs = list(zip(place.regions, pull.endpoint.regions, strict=True))
    local, remote = [], []
    for size in {region.block_bytes for region in place.regions}:  # usually one
        alike = [pair for pair in pairs if pair[0].block_bytes == size]
        lengths = runs.blocks * (size // part.of)
        local.append(_descriptors([mine for mine, _ in alike], runs.target, lengths, part))
        remote.append(_descriptors([theirs for _, theirs in alike], runs.source, lengths, pull.wanted.source))
    return np.vstack(local), np.vstack(remote)


def difference(pull: NixlPull, rows: slice, mine: Sums, page: Page) -> str:
    """Return a description of the first checksum difference in the pull's blocks number `rows`, "" if there
    is none."""
    sent = page.sums[pull.wanted.first + rows.start : pull.wanted.first + rows.stop]
    columns = slice(
        pull.wanted.source.index * pull.sub_parts, (pull.wanted.source.index + 1) * pull.sub_parts
    )
    targets, ids = pull.wanted.targets[rows], pull.ids[rows]
    return describe_difference(
        mine,
        sent[:, columns],
        lambda row: f"block {targets[row]}, from block {ids[row]} of agent {pull.endpoint.agent}",
    )


def _outside(blocks: Sequence[int], regions: Sequence[KvRegion]) -> bool:
    """Return whether a block is outside the memory of any region."""
    return bool(blocks) and (min(blocks) < 0 or max(blocks) >= min(region.blocks for region in regions))


def _descriptors(
    regions: Sequence[KvRegion], blocks: Numbers, lengths: Numbers, part: BlockPart
) -> Descriptors:
    """Return the descriptors for regions that differ only in their addresses, ordered by region."""
    size = regions[0].block_bytes
    bases = np.array([region.address for region in regions], dtype=np.int64)[:, None]
    found = np.empty((len(regions), len(blocks), 3), dtype=np.uint64)
    found[:, :, 0] = bases + (size // part.of * part.index + blocks * size)
    found[:, :, 1] = lengths
    found[:, :, 2] = device_ordinal(regions[0].device)
    return found.reshape(-1, 3)
