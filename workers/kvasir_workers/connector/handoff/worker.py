"""The hand-off half of the connector in the worker: executes the scheduler half's orders on one rank.

Called from the engine's step loop, one process per rank. It never raises into a step, which would end the
engine: a transfer error becomes a failed pull, which the engine recomputes or rejects as configured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import (
    UNSHARDED,
    BlockPart,
    KvTransfer,
    LeaseEnded,
    Offer,
    PeersRefused,
    PullFailed,
    PullSucceeded,
)
from kvasir_workers.connector.layer_slices import sending_stages
from kvasir_workers.connector.orders import (
    ExtendOrder,
    OfferOrder,
    PullOrder,
    PullParams,
    Received,
    StepOrders,
    StepReport,
)
from kvasir_workers.transfer.common.ticket import Ticket, decode

_log = logging.getLogger(__name__)

PULL_NAP_S = 0.0002
PULL_NAPS = 10
PATIENT_AFTER = 3
PATIENT_NAP_S = 0.003
LEASE_NAP_S = 0.001
MAX_EARLY_RELEASES = 1024


@dataclass(slots=True)
class _Lease:
    """`final`: the request has finished, and its blocks stay pinned until the lease ends."""

    request_id: str
    final: bool


@dataclass(slots=True)
class _Pull:
    """An order with `pieces` running. `early`: its ticket was written before all blocks were computed.
    `received` is summed over pieces."""

    order: PullOrder
    pieces: int
    early: bool = False
    received: Received | None = None


@dataclass(frozen=True, slots=True)
class _RankPart:
    """What this rank reads of number `rank` of a sender's tensor-parallel ranks, and as which of its readers.
    Unless it `moves`, the other rank only learns that its KV is not needed."""

    rank: int
    source: BlockPart = UNSHARDED
    target: BlockPart = UNSHARDED
    reader: BlockPart = UNSHARDED
    moves: bool = True


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a pull that concerns one rank of the sender."""

    pull_id: str
    offer: Offer
    part: _RankPart


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in its engine: `rank` of `ranks` tensor-parallel ranks of pipeline stage `stage` of
    `stages`, among which the model's `layers` are divided. `whole`: tensor-parallel ranks do not divide KV,
    each has all of it, as with MLA."""

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1
    layers: int = 0
    whole: bool = False


class HandoffWorker:
    """Offers and pulls of the rank at `place`. `pause` sleeps."""

    def __init__(
        self, transfer: KvTransfer, *, place: RankPlace, timeout_s: float, pause: Callable[[float], None]
    ) -> None:
        self._transfer = transfer
        self._place = place
        self._timeout_s = timeout_s
        self._pause = pause
        self._leases: dict[str, _Lease] = {}
        self._early_releases: OrderedDict[str, None] = OrderedDict()
        self._pulls: dict[str, _Pull] = {}
        self._pull_of: dict[str, str] = {}
        self._fruitless = 0
        self._refused: list[PullFailed] = []
        self._sent: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport()

    def lease(self, orders: StepOrders) -> None:
        """End, publish and extend leases. Called before the step's forward pass, since tickets may already be
        in flight and blocks of ended leases are about to be overwritten."""
        for lease_id in orders.releases:
            if lease_id in self._leases:
                self._transfer.release(lease_id)
        for order in orders.offers:
            if isinstance(order, OfferOrder):
                self._offer(order)
            else:
                self._extend(order)

    def pull(self, orders: Iterable[PullOrder]) -> None:
        """Start pulls."""
        for order in orders:
            self._fruitless = 0
            try:
                pieces = self._pieces(order)
            except TransferError as error:
                self._pulls[order.pull_id] = _Pull(order, 1)
                self._refused.append(PullFailed(order.pull_id, "layout", error.message))
                continue
            early = any(len(piece.offer.blocks) < piece.offer.total for piece in pieces)
            self._pulls[order.pull_id] = _Pull(order, len(pieces), early)
            for piece in pieces:
                self._pull_of[piece.pull_id] = order.pull_id
                try:
                    self._transfer.pull(
                        piece.pull_id,
                        piece.offer,
                        order.first_block,
                        order.targets if piece.part.moves else (),
                        self._timeout_s,
                        source=piece.part.source,
                        target=piece.part.target,
                        reader=piece.part.reader,
                    )
                except TransferError as error:
                    self._refused.append(PullFailed(piece.pull_id, "layout", error.message))

    def release(self, lease_ids: Iterable[str]) -> None:
        """Release leases that will not be pulled. A lease that is not offered yet ends when it is."""
        for lease_id in lease_ids:
            if lease_id in self._leases:
                self._transfer.release(lease_id)
                continue
            self._early_releases[lease_id] = None
            if len(self._early_releases) > MAX_EARLY_RELEASES:
                self._early_releases.popitem(last=False)

    def poll(self, idle: bool) -> tuple[set[str], set[str]]:
        """Return requests whose leases ended, and requests whose pulls ended or failed.

        An idle step sleeps here until an event, at most some milliseconds: otherwise the engine's loop would
        spin while a request waits or a lease is live. A pull that waits for a prompt to be computed is polled
        less often, since each poll takes time from the computation.
        """
        events = self._refused + self._transfer.poll()
        self._refused = []
        for nap_s in self._nap_times() if idle and not events else ():
            self._pause(nap_s)
            events = self._transfer.poll()
            if events:
                break
        self._fruitless = 0 if events else self._fruitless + 1
        received: set[str] = set()
        for event in events:
            match event:
                case LeaseEnded():
                    self._end_lease(event)
                case PeersRefused(count):
                    self._report.refused += count
                case _:
                    received |= self._end_pull(event)
        sent, self._sent = self._sent, set()
        return sent, received

    def take_failed(self) -> set[str]:
        """Return requests whose pulls failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> StepReport | None:
        """Return what was moved since the last call; None if nothing was."""
        if not (self._report.received or self._report.confirmed or self._report.refused):
            return None
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """Close the transfer."""
        self._transfer.close()

    def _nap_times(self) -> Sequence[float]:
        if not self._pulls:
            return [LEASE_NAP_S] if self._leases else []
        if self._fruitless >= PATIENT_AFTER and all(pull.early for pull in self._pulls.values()):
            return [PATIENT_NAP_S]
        return [PULL_NAP_S] * PULL_NAPS

    def _offer(self, order: OfferOrder) -> None:
        lease = order.lease
        if lease.lease_id in self._early_releases:
            del self._early_releases[lease.lease_id]
        else:
            try:
                self._transfer.offer(lease.lease_id, lease.fence, order.blocks, lease.ttl_s, order.total)
                self._leases[lease.lease_id] = _Lease(order.request_id, order.final)
                return
            except TransferError as error:
                _log.error("request %s: cannot offer its KV: %s", order.request_id, error)
        if order.final:
            self._sent.add(order.request_id)

    def _extend(self, order: ExtendOrder) -> None:
        lease = self._leases.get(order.lease_id)
        if lease is not None:
            lease.final = order.final
            self._transfer.extend(order.lease_id, order.blocks)
        elif order.final:  # the lease ended while the request ran
            self._sent.add(order.request_id)

    def _pieces(self, order: PullOrder) -> list[_Piece]:
        """Return this rank's pulls: one if the sender has as many ranks or fewer, else one from each rank
        that holds some of this rank's heads; from each stage that holds some of its layers. Raise
        TransferError."""
        ticket = decode(order.handoff.ticket)
        if order.first_block + len(order.targets) > ticket.total:
            raise TransferError(f"the pull needs more blocks than the {ticket.total} offered")
        stages = ticket.stages
        if stages < 1 or len(ticket.ranks) % stages:
            raise TransferError(f"the ticket has {len(ticket.ranks)} ranks in {stages} pipeline stages")
        place = self._place
        theirs = len(ticket.ranks) // stages
        parts = self._parts(theirs)
        sources = [
            (stage * theirs + part.rank, part)
            for stage in sending_stages(place.layers, place.stage, place.stages, stages)
            for part in parts
        ]
        return [
            _Piece(
                order.pull_id if len(sources) == 1 else f"{order.pull_id}/{number}",
                _offer(order.handoff, ticket, rank),
                part,
            )
            for number, (rank, part) in enumerate(sources)
        ]

    def _parts(self, theirs: int) -> list[_RankPart]:
        """Return what this rank reads of which of a stage's `theirs` tensor-parallel ranks. Raise
        TransferError."""
        place = self._place
        mine, rank = place.ranks, place.rank
        if theirs and mine % theirs == 0:
            sharing = mine // theirs
            of, share = divmod(rank, sharing)
            reader = BlockPart(share, sharing)
            return [_RankPart(of, UNSHARDED if place.whole else reader, reader=reader)]
        if theirs % mine == 0 and theirs:
            held = theirs // mine
            first = rank * held
            if place.whole:
                # Any of them has all of it.
                return [_RankPart(first + share, moves=share == 0) for share in range(held)]
            return [_RankPart(first + share, target=BlockPart(share, held)) for share in range(held)]
        raise TransferError(f"tensor_parallel_size: {mine} != {theirs}, and neither divides the other")

    def _end_lease(self, event: LeaseEnded) -> None:
        lease = self._leases.pop(event.lease_id, None)
        if lease is None:
            return
        if lease.final:
            self._sent.add(lease.request_id)
        if event.how == "expired":
            _log.warning("lease %s expired: its KV was offered and never pulled", event.lease_id)

    def _end_pull(self, event: PullSucceeded | PullFailed) -> set[str]:
        """Process the end of a pull or of a piece; return the request whose pull has ended."""
        pull_id = self._pull_of.pop(event.pull_id, event.pull_id)
        pull = self._pulls[pull_id]
        if isinstance(event, PullFailed):
            _log.warning("pull %s failed: %s: %s", event.pull_id, event.reason, event.detail)
            received = Received(0, 0.0, event.reason)
        else:
            received = Received(event.bytes_moved, event.seconds)
        pull.received = received if pull.received is None else pull.received.plus(received)
        pull.pieces -= 1
        if pull.pieces:
            return set()
        del self._pulls[pull_id]
        if not pull.order.parked:
            self._report.confirmed[pull_id] = 1
            return set()
        if pull.received.failure:
            self._failed.add(pull.order.pull_id)
        self._report.received[pull_id] = pull.received
        return {pull_id}


def _offer(handoff: PullParams, ticket: Ticket, rank: int) -> Offer:
    """Return the offer of one of the sender's ranks."""
    return Offer(
        handoff.lease_id, handoff.fence, handoff.ttl_s, ticket.blocks, ticket.total, ticket.ranks[rank]
    )
