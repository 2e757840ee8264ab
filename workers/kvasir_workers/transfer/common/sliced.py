"""A `KvTransfer` over slices of a rank's layers, each with an agent of its own.

Engines with different numbers of pipeline stages divide the layers differently. Slices end wherever a stage
of either engine ends, so that each slice of one engine is a slice of the other: agents move whole slices, and
know nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import (
    UNSHARDED,
    BlockPart,
    KvRegion,
    KvTransfer,
    LeaseEnded,
    Offer,
    PeersRefused,
    PullFailed,
    PullSucceeded,
    TransferEvent,
)
from kvasir_workers.transfer.common.lease_keys import issue, opened, seal
from kvasir_workers.transfer.common.ticket import pack_struct, unpack_struct


class SlicedEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The endpoints of a rank's agents, by the numbers of their slices. Their secrets or keys are behind it,
    in the order of the numbers."""

    slices: dict[int, str]


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Slice `number` of the model's, and the range of this rank's regions that holds it."""

    number: int
    regions: range


@dataclass(slots=True)
class _SlicedLease:
    """A lease of which `left` agents have not reported the end; `withdrawn`: nobody is told of its end."""

    left: int
    how: str = "pulled"
    withdrawn: bool = False


@dataclass(slots=True)
class _SlicedPull:
    """A pull of which `left` agents have not reported the end."""

    left: int
    bytes_moved: int = 0
    seconds: float = 0.0
    failure: PullFailed | None = None


class SlicedTransfer:
    """See `kvasir.ports.transfer.KvTransfer`. `make` returns an agent for each of `slices`. A pull moves the
    slices that both sides have; a lease ends when it has ended for every slice."""

    def __init__(self, slices: Sequence[LayerSlice], make: Callable[[], KvTransfer]) -> None:
        self._slices = tuple(slices)
        self._agents = {each.number: make() for each in slices}
        self._endpoint = ""
        self._leases: dict[str, _SlicedLease] = {}
        self._pulls: dict[str, _SlicedPull] = {}
        self._events: list[TransferEvent] = []

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        """See the port."""
        endpoints, secrets = {}, {}
        for each in self._slices:
            held = regions[each.regions.start : each.regions.stop]
            size = sum(region.block_bytes for region in held)
            part = replace(layout, layers=len(held), bytes_per_block=size)
            sealed = self._agents[each.number].register(held, part)
            endpoints[each.number], found = opened(sealed)
            secrets[each.number] = found[0] if found else b""
        packed = pack_struct(SlicedEndpoint(endpoints))
        self._endpoint = seal(packed, [secrets[number] for number in sorted(secrets)])
        return self._endpoint

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """See the port."""
        if lease_id in self._leases:
            raise TransferError(f"lease {lease_id} is live already")
        offered: list[KvTransfer] = []
        try:
            for agent in self._agents.values():
                made = agent.offer(lease_id, fence, blocks, ttl_s, total)
                offered.append(agent)
        except TransferError:
            if offered:
                self._leases[lease_id] = _SlicedLease(len(offered), withdrawn=True)
            for agent in offered:
                agent.release(lease_id)
            raise
        self._leases[lease_id] = _SlicedLease(len(offered))
        return replace(made, endpoint=issue(self._endpoint, lease_id, fence))

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """See the port."""
        for agent in self._agents.values():
            agent.extend(lease_id, blocks)

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
        if pull_id in self._pulls:
            raise TransferError(f"pull {pull_id} is under way already")
        try:
            theirs = _opened_slices(offer.endpoint)
            common = {number: theirs[number] for number in self._agents if number in theirs}
            if not common:
                mine = sorted(self._agents)
                raise TransferError(f"slices {sorted(theirs)} of the sender are none of {mine}")
        except TransferError as error:
            self._events.append(PullFailed(pull_id, "layout", error.message))
            return
        self._pulls[pull_id] = _SlicedPull(len(common))
        for number, endpoint in common.items():
            self._agents[number].pull(
                pull_id,
                replace(offer, endpoint=endpoint),
                first,
                target_blocks,
                timeout_s,
                source=source,
                target=target,
                reader=reader,
            )

    def release(self, lease_id: str) -> None:
        """See the port."""
        for agent in self._agents.values():
            agent.release(lease_id)

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        for agent in self._agents.values():
            for event in agent.poll():
                if isinstance(event, LeaseEnded):
                    self._end_lease(event)
                elif isinstance(event, PeersRefused):
                    self._events.append(event)
                else:
                    self._end_pull(event)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See the port."""
        for agent in self._agents.values():
            agent.close()

    def _end_lease(self, event: LeaseEnded) -> None:
        lease = self._leases[event.lease_id]
        lease.left -= 1
        if event.how != "pulled":
            lease.how = event.how
        if not lease.left:
            del self._leases[event.lease_id]
            if not lease.withdrawn:
                self._events.append(LeaseEnded(event.lease_id, lease.how))

    def _end_pull(self, event: PullSucceeded | PullFailed) -> None:
        pull = self._pulls[event.pull_id]
        pull.left -= 1
        if isinstance(event, PullSucceeded):
            pull.bytes_moved += event.bytes_moved
            pull.seconds = max(pull.seconds, event.seconds)
        else:
            pull.failure = pull.failure or event
        if not pull.left:
            del self._pulls[event.pull_id]
            moved = PullSucceeded(event.pull_id, pull.bytes_moved, pull.seconds)
            self._events.append(pull.failure or moved)


def _opened_slices(text: str) -> dict[int, str]:
    """Return the endpoint of each slice, with its key. Raise TransferError."""
    packed, keys = opened(text)
    slices = unpack_struct(packed, SlicedEndpoint, "endpoint of slices").slices
    if not keys:
        return slices
    if len(keys) != len(slices):
        raise TransferError(f"the endpoint has {len(keys)} keys for {len(slices)} slices")
    with_keys = zip(sorted(slices), keys, strict=True)
    return {number: seal(slices[number], [key]) if key else slices[number] for number, key in with_keys}
