"""One pull as the receiving side keeps it: what it wants, what has come, and which bytes go where."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion, Offer, Part
from kvasir_workers.transfer.checksums import PendingSums
from kvasir_workers.transfer.nixl.agent import Descriptor, Descriptors, device_ordinal
from kvasir_workers.transfer.nixl.endpoint import Endpoint
from kvasir_workers.transfer.nixl.leases import Extent
from kvasir_workers.transfer.nixl.pages import MAX_PAGE_BYTES, Page, page_bytes
from kvasir_workers.transfer.runs import Numbers, Runs, merge

BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Batch:
    """One read: of the wanted blocks number `rows`, all layers. Descriptors pairwise."""

    rows: slice
    local: Descriptors
    remote: Descriptors


@dataclass(frozen=True, slots=True)
class Look:
    """A reading of the lease and, where its place was known, of its page. `last`: begun when the last byte
    had arrived."""

    handle: int
    page: Extent | None
    last: bool


@dataclass(slots=True)
class Pull:
    """`ids` are the source's blocks as far as they are known, for the first of `targets`. `page` is where the
    sender has the lease's page, `place` where it is read to; `looked_in` is the poll of the last look."""

    pull_id: str
    offer: Offer
    endpoint: Endpoint
    first: int
    targets: tuple[int, ...]
    source: Part
    target: Part
    timeout_s: float
    started_s: float
    deadline_s: float
    slot: int
    ids: list[int] = field(default_factory=list)
    batches: deque[Batch] = field(default_factory=deque)
    reads: list[tuple[int, slice]] = field(default_factory=list)
    look: Look | None = None
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
        """Whether something may still write for this pull."""
        return bool(self.reads) or self.look is not None

    @property
    def known(self) -> bool:
        """Whether every block's id is known."""
        return len(self.ids) == len(self.targets)

    @property
    def arrived(self) -> bool:
        """Whether the last byte is here."""
        return self.known and not self.batches and not self.reads

    @property
    def sub_parts(self) -> int:
        """How many sums the sender gives for the part of a block that is pulled; 0: none that fits."""
        parts = self.endpoint.parts
        return 0 if parts % self.source.of else parts // self.source.of


def check_fits(pull: Pull, regions: Sequence[KvRegion], layout: KvLayout) -> None:
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


def batches(pull: Pull, regions: Sequence[KvRegion], first: int) -> list[Batch]:
    """Reads of the wanted blocks from number `first` on whose ids are known: neighbours together, and all
    layers of a block in one, so that it can be summed while the next is read. About BATCH_BYTES in each."""
    piece = sum(region.block_bytes for region in regions) // pull.target.of
    step = max(1, BATCH_BYTES // piece)
    edges = range(first, len(pull.ids), step)
    return [_batch(pull, regions, slice(at, min(at + step, len(pull.ids)))) for at in edges]


def _batch(pull: Pull, regions: Sequence[KvRegion], rows: slice) -> Batch:
    ids, targets = pull.ids[rows], pull.targets[rows]
    if pull.source.of > 1 or pull.target.of > 1:  # parts of neighbours are no neighbours
        runs = Runs(np.array(ids), np.array(targets), np.ones(len(ids), dtype=np.int64))
    else:
        runs = merge(ids, targets)
    pairs = list(zip(regions, pull.endpoint.regions, strict=True))
    local, remote = [], []
    for size in {region.block_bytes for region in regions}:  # mostly one
        alike = [pair for pair in pairs if pair[0].block_bytes == size]
        lengths = runs.blocks * (size // pull.target.of)
        local.append(_descriptors([mine for mine, _ in alike], runs.target, lengths, pull.target))
        remote.append(_descriptors([theirs for _, theirs in alike], runs.source, lengths, pull.source))
    return Batch(rows, np.vstack(local), np.vstack(remote))


def whole(region: KvRegion) -> Descriptor:
    """All of a region's memory."""
    return (region.address, region.blocks * region.block_bytes, device_ordinal(region.device))


def outside(blocks: Sequence[int], regions: Sequence[KvRegion]) -> bool:
    """Whether one of the blocks lies in none of the memory."""
    return bool(blocks) and (min(blocks) < 0 or max(blocks) >= min(region.blocks for region in regions))


def _descriptors(regions: Sequence[KvRegion], blocks: Numbers, lengths: Numbers, part: Part) -> Descriptors:
    """Those of regions that are alike but for their addresses, one region after the other."""
    size = regions[0].block_bytes
    bases = np.array([region.address for region in regions], dtype=np.int64)[:, None]
    found = np.empty((len(regions), len(blocks), 3), dtype=np.uint64)
    found[:, :, 0] = bases + (size // part.of * part.index + blocks * size)
    found[:, :, 1] = lengths
    found[:, :, 2] = device_ordinal(regions[0].device)
    return found.reshape(-1, 3)
