"""The state of a pull that both transfers keep: its arguments, deadline and result, and the check that it
fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import BlockPart, KvRegion, Offer, PullFailed, PullSucceeded


@dataclass(frozen=True, slots=True)
class PullSpec:
    """The arguments of `KvTransfer.pull`."""

    pull_id: str
    offer: Offer
    first: int
    targets: tuple[int, ...]
    source: BlockPart
    target: BlockPart
    reader: BlockPart
    timeout_s: float

    def succeeded(self, block_bytes: int, seconds: float) -> PullSucceeded:
        """Return the event of a pull of `block_bytes` bytes per target block."""
        return PullSucceeded(self.pull_id, len(self.targets) * block_bytes, seconds)

    def failed(self, reason: str, detail: str) -> PullFailed:
        """Return the event of a pull that failed."""
        return PullFailed(self.pull_id, reason, detail)


class PullTimer:
    """Deadline of one pull, which restarts with each progress. `now` reads a monotonic clock in seconds."""

    def __init__(self, timeout_s: float, now: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._began_s = self._progress_s = now()

    def restart(self) -> None:
        """Restart the deadline."""
        self._progress_s = self._now()

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self._now() >= self._progress_s + self._timeout_s

    @property
    def seconds(self) -> float:
        """Seconds since the pull began."""
        return self._now() - self._began_s

    @property
    def detail(self) -> str:
        """Detail of the failure of a late pull."""
        return f"no progress within {self._timeout_s:g} s"


@dataclass(frozen=True, slots=True)
class KvShape:
    """Form of one agent's KV: bytes of a block in each region, and how many blocks every region has."""

    layout: KvLayout
    block_bytes: tuple[int, ...]
    blocks: int

    def require(self, blocks: Sequence[int]) -> None:
        """Raise TransferError for a block that is not in the registered memory."""
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.blocks:
            raise TransferError(f"a block lies outside the {self.blocks} of the registered memory")


def shape_of(regions: Sequence[KvRegion], layout: KvLayout) -> KvShape:
    """Return the shape of an agent's regions."""
    sizes = tuple(region.block_bytes for region in regions)
    return KvShape(layout, sizes, min((region.blocks for region in regions), default=0))


def part_bytes(block_bytes: tuple[int, ...], part: BlockPart) -> list[int]:
    """Return the bytes of a part of a block in each region. Raise TransferError if there is no such part."""
    if not 0 <= part.index < part.of or any(size % part.of for size in block_bytes):
        raise TransferError(f"blocks of {sorted(set(block_bytes))} bytes have no {part}")
    return [size // part.of for size in block_bytes]


def check_fits(
    spec: PullSpec, local: KvShape, remote: KvShape, agent: str, differences: Sequence[str] = ()
) -> int:
    """Return the bytes of a target block's part over all regions. `remote` is the shape of the serving
    `agent`; `differences` are further ways in which its KV differs. Raise TransferError if the pull does not
    fit."""
    mine = part_bytes(local.block_bytes, spec.target)
    theirs = part_bytes(remote.block_bytes, spec.source)
    found = [*local.layout.differences(remote.layout), *differences]
    if mine != theirs:
        found.append(f"block_bytes of part 1/{spec.target.of} and 1/{spec.source.of}: {mine} != {theirs}")
    if found:
        raise TransferError(f"the KV of agent {agent} differs: " + "; ".join(found))
    end = spec.first + len(spec.targets)
    if spec.first < 0 or end > spec.offer.total:
        raise TransferError(f"blocks {spec.first} to {end} are not in the offer of {spec.offer.total}")
    local.require(spec.targets)
    return sum(mine)
