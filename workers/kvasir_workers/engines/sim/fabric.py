"""Transfers of simulated KV: tickets, leases that must outlive the transfer, and links with limited
bandwidth.

Nothing is copied, since the simulated model's tokens depend on the prompt alone; time, byte counts, and every
failure of a transfer are simulated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvasir.config.spec.deployment import SimSpec
from kvasir.core.errors import TransferError
from kvasir.core.requests import KvHandoff
from kvasir.ports.clock import Clock
from kvasir_workers.engines.sim.state import SimPullOrder


@dataclass(frozen=True, slots=True)
class SimTicket:
    """The content of a hand-off's opaque bytes: the sender, and the chained hash of each block of the prompt,
    including a last partial one."""

    worker_id: str
    epoch: int
    hashes: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return the bytes of KvHandoff.ticket."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SimTicket:
        """The inverse of `encode`. Raise TransferError (`layout`) for other bytes."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferError(f"the ticket cannot be read: {error}", code="layout") from error


class Offerer(Protocol):
    """The methods of an engine that the fabric exposes to its peers."""

    @property
    def epoch(self) -> int:
        """The worker's epoch."""
        ...

    def lease_problem(self, lease_id: str, fence: int) -> str | None:
        """Return None while the lease is live, else `expired` or `fenced`."""
        ...

    def lease_pulled(self, lease_id: str) -> None:
        """End the lease: a peer has all blocks."""
        ...

    def complete(self, lease_id: str) -> int:
        """Return how many blocks of the prompt are computed under a live lease."""
        ...

    async def progressed(self) -> None:
        """Return when some lease may have grown or ended."""
        ...


class SimFabric:
    """The simulated workers of one process, which can reach each other. A worker can be cut off."""

    def __init__(self) -> None:
        self._offerers: dict[str, Offerer] = {}
        self._cut: set[str] = set()
        self._busy_until: dict[str, float] = {}

    def join(self, worker_id: str, offerer: Offerer) -> None:
        """Let peers pull from a worker; a restarted worker replaces its earlier instance."""
        self._offerers[worker_id] = offerer

    def leave(self, worker_id: str, offerer: Offerer) -> None:
        """Remove a worker, which fails the pulls from it. A successor stays."""
        if self._offerers.get(worker_id) is offerer:
            del self._offerers[worker_id]
            self._busy_until.pop(worker_id, None)

    def cut(self, worker_id: str) -> None:
        """Make a live worker unreachable for transfers."""
        self._cut.add(worker_id)

    def heal(self, worker_id: str) -> None:
        """Undo `cut`."""
        self._cut.discard(worker_id)

    def offerer(self, ticket: SimTicket, handoff: KvHandoff) -> Offerer:
        """Return the worker that offers these blocks. Raise TransferError with the reason if they cannot be
        pulled."""
        offerer = self._offerers.get(ticket.worker_id)
        if offerer is None or ticket.worker_id in self._cut:
            raise TransferError(f"{ticket.worker_id} cannot be reached", code="unreachable")
        if offerer.epoch != ticket.epoch:
            raise TransferError(f"{ticket.worker_id} has restarted", code="fenced")
        problem = offerer.lease_problem(handoff.lease_id, handoff.fence)
        if problem is not None:
            raise TransferError(f"lease {handoff.lease_id} is {problem}", code=problem)
        return offerer

    def occupy(self, worker_id: str, now: float, seconds: float) -> float:
        """Queue `seconds` of sending on a worker's link; return when it ends."""
        done = max(now, self._busy_until.get(worker_id, now)) + seconds
        self._busy_until[worker_id] = done
        return done


class SimLink:
    """The pulling side of one engine.

    Without a fabric, as between processes, the ticket suffices: time and bytes are simulated, and the
    sender's lease ends by release or by its deadline.
    """

    def __init__(self, clock: Clock, timing: SimSpec, timeout_s: float, fabric: SimFabric | None) -> None:
        self._clock = clock
        self._timing = timing
        self._timeout_s = timeout_s
        self._fabric = fabric
        self._busy_until = 0.0

    async def pull(self, order: SimPullOrder) -> None:
        """Wait for as long as the transfer takes: blocks move as they are computed, in as many parts as
        needed. Raise TransferError, whose code is a reason of PullFailed: unreachable, layout, expired,
        fenced, or timeout if nothing has moved for too long."""
        ticket = SimTicket.decode(order.handoff.ticket)
        if ticket.hashes != order.hashes:
            raise TransferError("the hand-off is for another prompt or block size", code="layout")
        moved = 0
        while True:
            ready = order.missing
            if self._fabric is not None:
                ready = await self._ready(self._fabric, ticket, order, moved)
            await self._move(ticket, (ready - moved) * order.block_bytes)
            moved = ready
            if moved == order.missing:
                break
        if self._fabric is not None:
            # The blocks are valid only if the lease was live through the whole transfer.
            self._fabric.offerer(ticket, order.handoff).lease_pulled(order.handoff.lease_id)

    async def _ready(self, fabric: SimFabric, ticket: SimTicket, order: SimPullOrder, moved: int) -> int:
        """Return how many of the missing blocks are computed, once there are more than `moved`."""
        while True:
            offerer = fabric.offerer(ticket, order.handoff)
            ready = min(order.missing, offerer.complete(order.handoff.lease_id) - order.first)
            if ready > moved or order.missing == 0:
                return ready
            await self._wait(offerer)

    async def _wait(self, offerer: Offerer) -> None:
        progress = asyncio.ensure_future(offerer.progressed())
        patience = asyncio.ensure_future(self._clock.sleep(self._timeout_s))
        try:
            await asyncio.wait((progress, patience), return_when=asyncio.FIRST_COMPLETED)
            if not progress.done():
                raise TransferError(f"nothing was computed in {self._timeout_s} s", code="timeout")
        finally:
            progress.cancel()
            patience.cancel()

    async def _move(self, ticket: SimTicket, size: int) -> None:
        seconds = self._timing.transfer_latency_s + self._sending(ticket, size)
        if seconds > self._timeout_s:
            await self._clock.sleep(self._timeout_s)
            raise TransferError(f"not done after {self._timeout_s} s", code="timeout")
        await self._clock.sleep(seconds)

    def _sending(self, ticket: SimTicket, size: int) -> float:
        now = self._clock.now()
        seconds = size / self._timing.transfer_bytes_per_s
        if self._fabric is not None:
            return self._fabric.occupy(ticket.worker_id, now, seconds) - now
        self._busy_until = max(now, self._busy_until) + seconds
        return self._busy_until - now
