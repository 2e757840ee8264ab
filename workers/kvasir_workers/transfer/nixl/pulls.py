"""One pull as the receiving side keeps it: what it wants, what has come, and which bytes go where."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import BlockPart, KvRegion, Offer
from kvasir_workers.transfer.checksums import PendingSums, Sums, first_difference
from kvasir_workers.transfer.nixl.agent import Descriptors, device_ordinal
from kvasir_workers.transfer.nixl.endpoint import NixlEndpoint
from kvasir_workers.transfer.nixl.landing import BATCH_BYTES, ReadTarget
from kvasir_workers.transfer.nixl.leases import Extent
from kvasir_workers.transfer.nixl.pages import MAX_PAGE_BYTES, Page, page_bytes
from kvasir_workers.transfer.runs import Numbers, Runs, merge


@dataclass(frozen=True, slots=True)
class NixlRead:
    """A read of the wanted blocks number `rows`, all layers, into `place`."""

    handle: int
    rows: slice
    place: ReadTarget


@dataclass(frozen=True, slots=True)
class LeaseReading:
    """A reading of the lease and, where its place was known, of its page. `last`: begun when the last byte
    had arrived."""

    handle: int
    page: Extent | None
    last: bool


@dataclass(slots=True)
class NixlPull:
    """`ids` are the source's blocks as far as they are known, for the first of `targets`. `page` is where the
    sender has the lease's page, `place` where it is read to; `looked_in` is the poll of the last look.
    `batches` are rows that are yet to be read; `copies` are reads that have ended and are copied on."""

    pull_id: str
    offer: Offer
    endpoint: NixlEndpoint
    first: int
    targets: tuple[int, ...]
    source: BlockPart
    target: BlockPart
    timeout_s: float
    started_s: float
    deadline_s: float
    slot: int
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
        return len(self.ids) == len(self.targets)

    @property
    def arrived(self) -> bool:
        """Whether the last byte is in place."""
        return self.known and not (self.batches or self.reads or self.copies)

    @property
    def sub_parts(self) -> int:
        """How many sums the sender gives for the part of a block that is pulled; 0: none that fits."""
        parts = self.endpoint.parts
        return 0 if parts % self.source.of else parts // self.source.of


def check_fits(pull: NixlPull, regions: Sequence[KvRegion], layout: KvLayout) -> None:
    """Raises TransferError where the two sides' KV cannot be exchanged, or not as the pull says."""
    endpoint, source, target = pull.endpoint, pull.source, pull.target
    differences = layout.differences(endpoint.layout)
    mine = [region.block_bytes * source.of for region in regions]
    theirs = [region.block_bytes * target.of for region in endpoint.regions]
    if mine != theirs:
        differences.append(f"block_bytes of part 1/{source.of} in 1/{target.of}: {mine} != {theirs}")
    if differences:
        raise TransferError(f"the KV of agent {endpoint.agent} differs: " + "; ".join(differences))
    if not (0 <= source.index < source.of and 0 <= target.index < target.of):
        raise TransferError(f"no such part: {source} into {target}")
    if not 0 <= pull.first <= pull.offer.total - len(pull.targets):
        raise TransferError(
            f"{len(pull.targets)} blocks from number {pull.first} on are wanted of {pull.offer.total}"
        )
    if page_bytes(pull.offer.total, endpoint.parts) > MAX_PAGE_BYTES and not pull.offer.blocks:
        raise TransferError(f"an offer of {pull.offer.total} blocks is too large")
    if outside(pull.targets, regions):
        raise TransferError("a target block lies outside the receiving side's memory")


def learn(pull: NixlPull, ids: Sequence[int], regions: Sequence[KvRegion], now: float) -> None:
    """Take in the ids of the lease's first blocks: those that are wanted and were not known are to be read,
    all layers of a block at once, so that it can be summed while the next is read, about BATCH_BYTES in each
    read. Raises TransferError for ids that cannot be."""
    wanted = list(ids[pull.first : pull.first + len(pull.targets)])
    begin = len(pull.ids)
    if wanted[:begin] != pull.ids[: len(wanted)]:
        raise TransferError("the lease's blocks are not those of its ticket")
    if outside(wanted[begin:], pull.endpoint.regions):
        raise TransferError("the offer names blocks outside the offering side's memory")
    if len(wanted) > begin:
        pull.ids = wanted
        piece = sum(region.block_bytes for region in regions) // pull.target.of
        step = max(1, BATCH_BYTES // piece)
        edges = range(begin, len(wanted), step)
        pull.batches.extend(slice(at, min(at + step, len(wanted))) for at in edges)
        pull.deadline_s = now + pull.timeout_s


def descriptors(pull: NixlPull, rows: slice, place: ReadTarget) -> tuple[Descriptors, Descriptors]:
    """Of `place` and of the sender's memory, pairwise: what a read of the wanted blocks number `rows` moves,
    neighbours together."""
    ids, part = pull.ids[rows], place.part
    if pull.source.of > 1 or part.of > 1:  # parts of neighbours are no neighbours
        runs = Runs(np.array(ids), np.array(place.targets), np.ones(len(ids), dtype=np.int64))
    else:
        runs = merge(ids, place.targets)
    pairs = list(zip(place.regions, pull.endpoint.regions, strict=True))
    local, remote = [], []
    for size in {region.block_bytes for region in place.regions}:  # mostly one
        alike = [pair for pair in pairs if pair[0].block_bytes == size]
        lengths = runs.blocks * (size // part.of)
        local.append(_descriptors([mine for mine, _ in alike], runs.target, lengths, part))
        remote.append(_descriptors([theirs for _, theirs in alike], runs.source, lengths, pull.source))
    return np.vstack(local), np.vstack(remote)


def difference(pull: NixlPull, rows: slice, mine: Sums, page: Page) -> str:
    """What was sent and what has come of the wanted blocks number `rows`, where the two first differ; empty
    where they are alike."""
    sent = page.sums[pull.first + rows.start : pull.first + rows.stop]
    columns = slice(pull.source.index * pull.sub_parts, (pull.source.index + 1) * pull.sub_parts)
    differ = first_difference(mine, sent[:, columns])
    if differ is None:
        return ""
    row, found, expected = differ
    block, theirs = pull.targets[rows][row], pull.ids[rows][row]
    return (
        f"block {block}, from block {theirs} of agent {pull.endpoint.agent}, sums up to "
        f"{found:016x}, and {expected:016x} was sent"
    )


def outside(blocks: Sequence[int], regions: Sequence[KvRegion]) -> bool:
    """Whether one of the blocks lies in none of the memory."""
    return bool(blocks) and (min(blocks) < 0 or max(blocks) >= min(region.blocks for region in regions))


def _descriptors(
    regions: Sequence[KvRegion], blocks: Numbers, lengths: Numbers, part: BlockPart
) -> Descriptors:
    """Those of regions that are alike but for their addresses, one region after the other."""
    size = regions[0].block_bytes
    bases = np.array([region.address for region in regions], dtype=np.int64)[:, None]
    found = np.empty((len(regions), len(blocks), 3), dtype=np.uint64)
    found[:, :, 0] = bases + (size // part.of * part.index + blocks * size)
    found[:, :, 1] = lengths
    found[:, :, 2] = device_ordinal(regions[0].device)
    return found.reshape(-1, 3)
