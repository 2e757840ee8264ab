"""What a request holds on workers: running legs, a lease on KV, accounted work.

A request runs in one leg, or in two while its DECODE leg pulls what its PREFILL leg computes. Everything
taken here is also released here, however the request ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir.core.requests import Delta, EngineRequest, FinishReason, KvHandoff, Leg
from kvasir.ports.routing import RoutingTarget
from kvasir_router.fleet.fleet import TargetLoad, Worker
from kvasir_router.requests.events import AbortOn, ReleaseOn, SubmitTo
from kvasir_router.requests.state import HeldLease, RequestState, RunningLeg
from kvasir_router.requests.table import RequestTable

FAILED = (FinishReason.ERROR, FinishReason.ABORT)


class LegControl:
    """Starts and ends legs and leases of the table's requests."""

    def __init__(self, table: RequestTable) -> None:
        self._fleet = table.fleet
        self._out = table.out
        self._limits = table.limits

    def submit(
        self, state: RequestState, kind: Leg, target: RoutingTarget, handoff: KvHandoff | None = None
    ) -> None:
        """Start a leg of the request at `target`."""
        request = state.current
        worker = self._fleet.workers[target.worker_id]
        leg_id = worker.free_leg_id(request.request_id, state.attempts)
        worker.legs[leg_id] = request.request_id
        state.leg = RunningLeg(leg_id, kind, target)
        leg = EngineRequest(
            request_id=leg_id,
            tokens=request.tokens,
            sampling=request.sampling,
            leg=kind,
            handoff=handoff,
            adapter=request.adapter,
            salt=request.salt,
            priority=request.priority,
            data_parallel_rank=target.rank if worker.identity.data_parallel_size > 1 else None,
            trace_context=request.trace_context,
            continuation=None if kind is Leg.PREFILL else state.continuation,
            tier_tokens=0 if kind is Leg.DECODE else sum(state.planned.predicted_tier_tokens),
            parsing=None if kind is Leg.PREFILL else request.parsing,
            media=request.media,
            slo=self._limits.named_slo(request),
        )
        self._out.append(SubmitTo(target.worker_id, leg))

    def ended(self, state: RequestState) -> RunningLeg:
        """The leg that produces the client's tokens ended."""
        leg = running(state)
        state.leg = None
        del self._fleet.workers[leg.target.worker_id].legs[leg.leg_id]
        return leg

    def ended_ahead(self, state: RequestState) -> None:
        """The PREFILL leg beside a DECODE leg ended."""
        if state.ahead is not None:
            del self._fleet.workers[state.ahead.target.worker_id].legs[state.ahead.leg_id]
            state.ahead = None

    def stop(self, state: RequestState, now: float) -> None:
        """Abort all running legs of the request."""
        for leg in (state.ahead, state.leg):
            if leg is not None:
                self._abort(leg, now)
        state.leg = state.ahead = None

    def stop_decode(self, state: RequestState, now: float) -> None:
        """Abort the leg that produces the client's tokens; a PREFILL leg beside it goes on."""
        self._abort(running(state), now)
        state.leg = None

    def stop_ahead(self, state: RequestState, now: float) -> None:
        """Abort the PREFILL leg beside a DECODE leg, if there is one: its result is not needed."""
        if state.ahead is not None:
            self._abort(state.ahead, now)
            self.settle(state, state.ahead.target)
            state.ahead = None

    def _abort(self, leg: RunningLeg, now: float) -> None:
        worker = self._fleet.workers[leg.target.worker_id]
        worker.forget_ghosts(now - self._limits.ghost_ttl_s)
        worker.abandon(leg.leg_id, now)
        self._out.append(AbortOn(worker.worker_id, (leg.leg_id,)))

    def unowned(self, worker: Worker, delta: Delta) -> None:
        """Handle a delta of an aborted leg: forget the leg at its end, and release KV that it offered."""
        if delta.last:
            worker.ghosts.pop(delta.request_id, None)
        if delta.handoff is not None:
            self._out.append(ReleaseOn(worker.worker_id, (delta.handoff.lease_id,)))

    def hold(self, state: RequestState, worker_id: str, handoff: KvHandoff, now: float) -> None:
        """Record the lease that a worker granted; a request holds one lease at a time."""
        held = state.lease
        if held is not None and held.handoff.lease_id != handoff.lease_id:
            self.release(state)
            held = None
        state.lease = HeldLease(
            worker_id, handoff, now + handoff.ttl_s, failed=held is not None and held.failed
        )

    def release(self, state: RequestState) -> None:
        """Release the request's lease, if it holds one."""
        if state.lease is not None:
            self._out.append(ReleaseOn(state.lease.worker_id, (state.lease.handoff.lease_id,)))
            state.lease = None

    def prefilled(self, state: RequestState, target: RoutingTarget, now: float, *, leaves: bool) -> None:
        """The prompt is computed at `target`; the request stays there, or `leaves`."""
        self._fleet.confirm(state.request.request_id, target, now)
        charged = state.charges.get(target, TargetLoad())
        done = charged.copy() if leaves else charged.prompt()
        self._fleet.settle(state.charges, target, done)

    def settle(self, state: RequestState, target: RoutingTarget) -> None:
        """Remove the work accounted for the request at `target`."""
        charged = state.charges.get(target)
        if charged is not None:
            self._fleet.settle(state.charges, target, charged.copy())

    def discharge(self, state: RequestState) -> None:
        """Remove all accounted work of the request, and the predicted blocks that were not computed."""
        self._fleet.abandon(state.request.request_id)
        for target in list(state.charges):
            self.settle(state, target)

    def lost(self, states: Iterable[RequestState], worker_id: str) -> None:
        """Drop what requests held on a lost worker."""
        for state in states:
            if state.lease is not None and state.lease.worker_id == worker_id:
                state.lease = None
            if state.leg is not None and state.leg.target.worker_id == worker_id:
                state.leg = None
            if state.ahead is not None and state.ahead.target.worker_id == worker_id:
                state.ahead = None
            for target in [target for target in state.charges if target.worker_id == worker_id]:
                del state.charges[target]


def running(state: RequestState) -> RunningLeg:
    """Return the running leg of a request. Raises AssertionError if none runs."""
    if state.leg is None:
        raise AssertionError("nothing runs for this request")
    return state.leg


def is_leg(leg: RunningLeg | None, worker_id: str, delta: Delta) -> bool:
    """Whether the worker's delta is of this leg."""
    return leg is not None and leg.leg_id == delta.request_id and leg.target.worker_id == worker_id
