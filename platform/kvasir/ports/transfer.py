"""The port of KV transfers between the memories of two workers.

The receiver pulls, because only it knows which blocks it lacks and where they go. The sender's blocks are
pinned under a lease until the receiver confirms, the router releases, or the deadline passes. A pull can
start before the sender has computed all of its blocks: blocks are identified by their position in the prompt,
and each is transferred once the sender reports it as complete. The port is synchronous and polled because it
runs in an engine's step loop, which must never wait for a network.
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
    """A lease on blocks of the sender, as a ticket with which another process can pull.

    `blocks` are the sender's block ids in prompt order that were complete when the offer was made, the first
    of `total`. `endpoint` is the address of the sender's agent and the key of this lease, in the format of
    the adapter.
    """

    lease_id: str
    fence: int
    ttl_s: float
    blocks: tuple[int, ...]
    total: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One of `of` equal parts of every block of every layer: the KV heads of one tensor-parallel rank, if the
    ranks of the other side hold fewer or more heads."""

    index: int = 0
    of: int = 1


UNSHARDED = BlockPart()


@dataclass(frozen=True, slots=True)
class PullSucceeded:
    """A pull succeeded: every target block holds the bytes of the source, verified by checksum if the sender
    provided checksums."""

    pull_id: str
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A pull failed: the contents of all target blocks are undefined, and no more writes to them occur.
    `reason` is a stable word: unreachable, layout, ticket, expired, fenced, timeout, checksum, closed or
    io."""

    pull_id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease of this agent ended and its blocks are free. `how`: pulled, released or expired."""

    lease_id: str
    how: str


@dataclass(frozen=True, slots=True)
class PeersRefused:
    """`count` peers of this agent had no valid ticket. They got no bytes, and no answer about leases."""

    count: int


TransferEvent = PullSucceeded | PullFailed | LeaseEnded | PeersRefused


class KvTransfer(Protocol):
    """One agent per engine rank. Not thread-safe: all calls come from the thread of the step loop.

    Obligations: no call blocks longer than a few milliseconds; each pull yields exactly one PullSucceeded or
    PullFailed, each offer exactly one LeaseEnded; bytes of an expired or fenced lease are never reported as
    PullSucceeded; `close` ends everything and frees registered memory. A peer that is lost, hangs, or returns
    under a new endpoint affects only pulls from it. Who has no ticket of a lease can neither pull nor confirm
    it, as far as the fabric asks the sender.
    """

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        """Register local KV memory with the fabric and return the agent's endpoint, with its secret: see
        kvasir_workers.transfer.common.lease_keys. Once per agent."""
        ...

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """Pin `blocks`, which are complete, under a lease on `total` blocks (None: on these only). Raises
        TransferError if `lease_id` is live."""
        ...

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """Add complete blocks that follow the earlier ones of a lease, and restart its `ttl_s`. Unknown ids
        are ignored."""
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
        reader: BlockPart | None = None,
    ) -> None:
        """Start copying the blocks `first`, `first + 1`, … of the offer to `target_blocks`: the part `source`
        of each block to the part `target`. Without targets, the lease is confirmed and no bytes are moved. A
        running pull fails if no further block becomes complete for `timeout_s`.

        A lease is pulled when `reader.of` readers have confirmed. By default each reads a part of its own,
        and `reader` is `source`.
        """
        ...

    def release(self, lease_id: str) -> None:
        """End a lease of this agent early; unknown ids are ignored."""
        ...

    def poll(self) -> list[TransferEvent]:
        """Make progress and return the events since the last call."""
        ...

    def close(self) -> None:
        """End everything. Idempotent."""
        ...
