"""Places requests: gets a plan from the policy, checks that there is room, and starts the legs.

A request is placed on arrival, when its turn in the queue has come, and after a failure. The DECODE leg of a
disaggregated request may start before its PREFILL leg has ended.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

from kvasir.core.requests import Leg
from kvasir.ports.routing import Plan, RoutingTarget
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.state import HeldLease, Phase, RequestState
from kvasir_router.requests.table import RequestTable


class NoRoom(Enum):
    """Returned in place of a plan if workers serve the request and none has room."""

    NO_ROOM = auto()


NO_ROOM = NoRoom.NO_ROOM


class Placement:
    """Gets plans from the fleet, checks them with admission, and starts requests."""

    def __init__(self, table: RequestTable, legs: LegControl) -> None:
        self._table = table
        self._fleet = table.fleet
        self._admission = table.admission
        self._legs = legs

    def plan(
        self,
        state: RequestState,
        now: float,
        prefilled_on: RoutingTarget | None = None,
        without: frozenset[str] = frozenset(),
    ) -> Plan | None:
        """Return the policy's plan, avoiding the workers in `without` if others serve; None if no worker
        does."""
        state.hashes = state.hashes or self._fleet.hashes(state.current)
        avoid = state.avoid | without if without else state.avoid
        return self._fleet.plan(state.current, state.hashes, now, avoid=avoid, prefilled_on=prefilled_on)

    def fitting(self, state: RequestState, now: float) -> Plan | NoRoom | None:
        """Return a plan whose places have room for the request; None if no worker serves it."""
        plan = self.plan(state, now)
        if plan is None:
            return None
        crowded = self._admission.crowded(state.ticket, state.current, plan, now)
        if not crowded:
            return plan
        if not self._admission.takes(state.ticket):
            return NO_ROOM
        # Another place has room, but the policy may return the same one.
        return self.plan(state, now, without=crowded) or plan

    def predict(self, state: RequestState, now: float) -> Plan | None:
        """Return the plan that the request would get on other workers."""
        return self._fleet.plan(state.current, state.hashes, now, avoid=state.avoid, tentative=True)

    def route(self, state: RequestState, now: float) -> None:
        """Start a request that holds nothing, or park it."""
        plan = self.plan(state, now)
        if plan is None:
            self._admission.park(state.ticket)
            self._table.wait_until(state, now)
        else:
            self.start(state, plan, now)

    def unpark(self, now: float) -> None:
        """Place parked requests after the serving workers changed."""
        for ticket in self._admission.unpark(now):
            state = self._table.states[ticket.request_id]
            plan = self.plan(state, now)
            if plan is None:
                self._admission.park(ticket)
            else:
                state.queued_until = None
                self.start(state, plan, now)

    def start_queued(self, now: float) -> None:
        """Start queued requests in order, while there is room."""
        lacking = self._fleet.missing() is not None
        while (ticket := self._admission.next(now)) is not None:
            state = self._table.states[ticket.request_id]
            # A request that runs whole on one worker needs fewer roles than an ordinary one.
            plan = None if lacking and not ticket.whole else self.fitting(state, now)
            if plan is None:
                self._admission.park(ticket)
            elif isinstance(plan, Plan):
                state.queued_until = None
                self.start(state, plan, now)

    def start(self, state: RequestState, plan: Plan, now: float) -> None:
        """Start the first leg of `plan`."""
        self._admission.begins(state.ticket, now)
        state.plan = plan
        state.started_s = now
        state.routed_s = now if state.routed_s is None else state.routed_s
        state.route_s = self._fleet.decided_s
        state.charges = self._fleet.commit(state.current, state.hashes, plan, now)
        if plan.prefill is None:
            state.phase = Phase.DECODING
            self._legs.submit(state, Leg.FULL, plan.decode)
        else:
            state.phase = Phase.PREFILLING
            self._legs.submit(state, Leg.PREFILL, plan.prefill)
        limits = self._table.limits
        if limits.hedge_after and plan.predicted_ttft_s and not state.hedged:
            timeout_s = max(limits.hedge_min_s, limits.hedge_after * plan.predicted_ttft_s)
            state.hedge_at = now + timeout_s
            self._table.timers.set(state.hedge_at, state.request.request_id)

    def hand_over(self, state: RequestState, now: float) -> bool:
        """Start the DECODE leg as planned, or on another worker if the planned one takes no new work. A
        running PREFILL leg goes on beside it. Return False, without any change, if there is no place."""
        lease = state.lease
        if lease is None:
            raise AssertionError("nothing to hand over")
        source = state.planned.prefill_target
        if not self._as_planned(state) and not self._plan_anew(state, source, lease, now):
            return False
        if state.leg is None:
            self._legs.prefilled(state, source, now, leaves=True)
        state.ahead, state.leg = state.leg, None
        state.phase = Phase.DECODING
        state.decode_s, state.overlap_s = now, 0.0
        self._legs.submit(state, Leg.DECODE, state.planned.decode, lease.handoff)
        return True

    def _as_planned(self, state: RequestState) -> bool:
        """Whether the request can decode as planned. A plan on an earlier instance of the worker is not
        accounted, and its rank may not exist."""
        target = state.planned.decode
        return target in state.charges and self._fleet.accepts(target.worker_id)

    def _plan_anew(self, state: RequestState, source: RoutingTarget, lease: HeldLease, now: float) -> bool:
        plan = self.plan(state, now, prefilled_on=source)
        if plan is None or plan.prefill != source:
            return False
        # A later hand-off, or a restart, is better.
        if plan.decode.worker_id in state.avoid and (state.leg is not None or lease.failed):
            return False
        self._legs.discharge(state)
        state.plan = replace(state.planned, decode=plan.decode)
        state.charges = self._fleet.commit(state.current, state.hashes, plan, now)
        return True
