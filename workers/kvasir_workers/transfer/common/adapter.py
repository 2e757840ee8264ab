"""The part of a `KvTransfer` that does not depend on the fabric: it forwards each call of the port to the
serving or the receiving side of one agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import (
    UNSHARDED,
    BlockPart,
    KvRegion,
    LeaseEnded,
    Offer,
    PeersRefused,
    PullFailed,
    PullSucceeded,
    TransferEvent,
)
from kvasir_workers.transfer.common.checksums import require_parts
from kvasir_workers.transfer.common.lease_keys import issue
from kvasir_workers.transfer.common.pulls import PullSpec


class Sender(Protocol):
    """The serving side of an agent. `poll` and `close` return the leases that ended since the last call."""

    def offer(self, lease_id: str, fence: int, blocks: Sequence[int], *, total: int, ttl_s: float) -> None:
        """Grant a lease. Raise TransferError if it cannot be granted."""
        ...

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """Add completed blocks to a lease and restart its deadline."""
        ...

    def release(self, lease_id: str) -> None:
        """End a lease if it is live."""
        ...

    def poll(self) -> list[LeaseEnded]:
        """End leases past their deadline."""
        ...

    def take_refused(self) -> int:
        """Return how many peers without a valid ticket were refused since the last call."""
        ...

    def close(self) -> list[LeaseEnded]:
        """End every lease."""
        ...


class Receiver(Protocol):
    """The receiving side of an agent. `poll` and `close` return the pulls that ended since the last call."""

    def pull(self, spec: PullSpec) -> None:
        """Begin a pull. Errors are reported as PullFailed by `poll`. Raise TransferError only if a pull of
        this id is running."""
        ...

    def poll(self) -> list[PullSucceeded | PullFailed]:
        """Progress the pulls."""
        ...

    def close(self) -> list[PullSucceeded | PullFailed]:
        """Fail the pulls that are running."""
        ...


class AgentTransfer(ABC):
    """See `kvasir.ports.transfer.KvTransfer`.

    `now` reads a monotonic clock in seconds, from any thread. `checksum_parts` is the number of checksums per
    offered block; pulled blocks are compared with their sender's checksums. 0 disables both.
    """

    def __init__(self, now: Callable[[], float], checksum_parts: int) -> None:
        self._now = now
        self._parts = checksum_parts
        self._endpoint = ""
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._final_events: list[TransferEvent] = []

    @abstractmethod
    def _start(self, regions: Sequence[KvRegion], layout: KvLayout) -> tuple[Sender, Receiver, str]:
        """Start both sides over regions of one device; return them and the agent's endpoint, with its
        secret."""

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        """See the port. Raise TransferError when called twice, when regions are on different devices, when
        blocks cannot be summed in parts, or when the fabric cannot start."""
        if self._endpoint:
            raise TransferError("KV memory is registered already")
        if len({region.device for region in regions}) != 1:
            raise TransferError("an agent's KV must lie on one device")
        require_parts(regions, self._parts)
        self._sender, self._receiver, self._endpoint = self._start(regions, layout)
        return self._endpoint

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """See the port. Raise TransferError also when there is no room for another lease."""
        if self._sender is None:
            raise TransferError("no KV memory is registered")
        total = len(blocks) if total is None else total
        self._sender.offer(lease_id, fence, blocks, total=total, ttl_s=ttl_s)
        endpoint = issue(self._endpoint, lease_id, fence)
        return Offer(lease_id, fence, ttl_s, tuple(blocks), total, endpoint)

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """See the port."""
        if self._sender is not None:
            self._sender.extend(lease_id, blocks)

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
        """See the port."""
        if self._receiver is None:
            raise TransferError("no KV memory is registered")
        targets, as_reader = tuple(target_blocks), reader or source
        self._receiver.pull(PullSpec(pull_id, offer, first, targets, source, target, as_reader, timeout_s))

    def release(self, lease_id: str) -> None:
        """See the port."""
        if self._sender is not None:
            self._sender.release(lease_id)

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        events, self._final_events = self._final_events, []
        if self._sender is not None:
            events += self._sender.poll()
            if refused := self._sender.take_refused():
                events.append(PeersRefused(refused))
        if self._receiver is not None:
            events += self._receiver.poll()
        return events

    def close(self) -> None:
        """See the port. Running pulls and live leases end as closed or released, in the next poll()."""
        if self._sender is None or self._receiver is None:
            return
        self._final_events += self._receiver.close()
        self._final_events += self._sender.close()
        self._sender = self._receiver = None
