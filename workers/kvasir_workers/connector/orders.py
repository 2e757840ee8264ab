"""The messages between the connector's two halves, once per engine step.

The scheduler half decides which blocks are offered and where pulled blocks go. The worker half, one per rank
and perhaps in another process, moves bytes. So these values must pickle, and carry no engine types.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvasir_workers.connector.tiers.orders import TierOrders, TierReport


class OfferParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params["offer"]` of a PREFILL request: the lease to put on its blocks."""

    lease_id: str
    fence: int
    ttl_s: float


class PullParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params["pull"]` of a DECODE request: the hand-off to pull."""

    lease_id: str
    fence: int
    ttl_s: float
    blocks: int
    ticket: str


@dataclass(frozen=True, slots=True)
class OfferOrder:
    """Lease `total` blocks of a request, of which `blocks`, in the prompt's order, are complete. `final`: the
    request has finished, and its blocks stay pinned until the lease ends."""

    request_id: str
    lease: OfferParams
    blocks: tuple[int, ...]
    total: int
    final: bool


@dataclass(frozen=True, slots=True)
class ExtendOrder:
    """Further blocks of a lease are complete. `final`: as in OfferOrder."""

    request_id: str
    lease_id: str
    blocks: tuple[int, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Pull blocks `first_block`, `first_block + 1`, … of the hand-off into `targets`.

    `parked`: the request waits for the pull. Otherwise there is nothing to load, and the pull only ends the
    lease.
    """

    pull_id: str
    handoff: PullParams
    first_block: int
    targets: tuple[int, ...]
    parked: bool


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Orders from the scheduler half to the worker half. `idle`: the step computes no token. `releases` are
    ids of leases whose requests ended early; they are processed first, because this step may reuse their
    blocks."""

    releases: tuple[str, ...] = ()
    offers: tuple[OfferOrder | ExtendOrder, ...] = ()
    pulls: tuple[PullOrder, ...] = ()
    idle: bool = True
    tiers: TierOrders | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """What one rank moved for one request; `bytes_moved` is 0 if the pull failed."""

    bytes_moved: int
    seconds: float
    failure: str = ""

    def plus(self, other: Received) -> Received:
        """Merge the same pull of two ranks: bytes are added, the longer time counts, and one failure fails
        both."""
        return Received(
            self.bytes_moved + other.bytes_moved,
            max(self.seconds, other.seconds),
            self.failure or other.failure,
        )


@dataclass(slots=True)
class StepReport:
    """Report from the worker half to the scheduler half. `received` is by request; `confirmed` counts ranks
    by pull; `refused` counts peers without a valid ticket."""

    received: dict[str, Received] = field(default_factory=dict)
    confirmed: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    tiers: TierReport = field(default_factory=TierReport)

    def merge(self, other: StepReport) -> None:
        """Merge another rank's report."""
        for request_id, received in other.received.items():
            mine = self.received.get(request_id)
            self.received[request_id] = received if mine is None else mine.plus(received)
        for pull_id, ranks in other.confirmed.items():
            self.confirmed[pull_id] = self.confirmed.get(pull_id, 0) + ranks
        self.refused += other.refused
        self.tiers.merge(other.tiers)
