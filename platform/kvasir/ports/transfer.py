"""Moving KV blocks between two workers' memories.

The receiver pulls: only it knows which blocks it lacks and where they shall go. The sender's blocks
stay pinned under a lease until the receiver confirms, the router releases, or the deadline passes.
A pull may begin before the sender has computed all that it covers: blocks are named by their place in the
prompt, and each moves as soon as the sender says that it is complete.
The port is synchronous and polled because it lives inside an engine's step loop, which must never
wait for a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.core.identity import KvLayout


@dataclass(frozen=True, slots=True)
class KvRegion:
    """One layer's KV in memory: `blocks` blocks of `block_bytes` each, contiguous from `address`.

    `device` is "cpu" or "cuda:N".
    """

    address: int
    block_bytes: int
    blocks: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Offer:
    """A lease on blocks of the offering side, as a ticket that another process can pull with.

    `blocks` are the block ids on the offering side, in the prompt's order, that were complete when the offer
    was made, the first of `total`. `endpoint` says where the offering agent can be reached; its form is the
    adapter's own.
    """

    lease_id: str
    fence: int
    ttl_s: float
    blocks: tuple[int, ...]
    total: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One of `of` equal parts of every block of every layer: the KV heads of one tensor-parallel rank, where
    the other side's ranks hold fewer or more heads."""

    index: int = 0
    of: int = 1


UNSHARDED = BlockPart()


@dataclass(frozen=True, slots=True)
class PullSucceeded:
    """A pull ended well: every destination block holds the source's bytes, by checksum where the offering
    side gave checksums."""

    pull_id: str
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A pull ended badly: no destination block may be trusted, and nothing writes to one any more.
    `reason` is a stable word: unreachable, layout, expired, fenced, timeout, checksum, closed or io."""

    pull_id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease of ours ended and its blocks are free. `how`: pulled, released or expired."""

    lease_id: str
    how: str


TransferEvent = PullSucceeded | PullFailed | LeaseEnded


class KvTransfer(Protocol):
    """One agent per engine rank. Not thread-safe: all calls come from the thread of the step loop.

    Obligations: no call blocks longer than a few milliseconds; each pull yields exactly one Pulled
    or PullFailed, each offer exactly one LeaseEnded; no bytes of an expired or fenced lease are ever
    reported as Pulled; `close` ends everything and frees what was registered. A peer that is gone, hangs, or
    comes back under a new endpoint harms only the pulls from it.
    """

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        """Make local KV memory known to the fabric; returns this agent's endpoint. Once per agent."""
        ...

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """Pin `blocks`, which are complete, under a lease on `total` blocks (None: on these alone). Raises
        TransferError if `lease_id` is already live."""
        ...

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """More blocks of a lease are complete, which follow those before; it runs for its `ttl_s` anew.
        Unknown ids are ignored."""
        ...

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        target_blocks: Sequence[int],
        timeout_s: float,
        *,
        source: BlockPart = UNSHARDED,
        target: BlockPart = UNSHARDED,
    ) -> None:
        """Begin to copy the offer's blocks number `first`, `first + 1`, … to `target_blocks`: of each the
        part `source`, into the part `target`. No targets: the lease is confirmed without a byte moved. A pull
        that has not ended fails when no further block has become complete for `timeout_s`.

        A lease has been pulled once as many readers have confirmed as `source.of` says, each its own part.
        """
        ...

    def release(self, lease_id: str) -> None:
        """End a lease of ours early; unknown ids are ignored."""
        ...

    def poll(self) -> list[TransferEvent]:
        """Progress and collect what ended since the last call."""
        ...

    def close(self) -> None:
        """End everything. Idempotent."""
        ...
