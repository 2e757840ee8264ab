"""From the PREFILL leg to the DECODE leg, which may begin before the other has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from kvasir.core.requests import Leg
from kvasir.ports.routing import Plan, RoutingTarget
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.state import HeldLease, Phase, RequestState


class MakePlan(Protocol):
    """Decides where a request runs, given where its prompt was computed."""

    def __call__(
        self, state: RequestState, now: float, prefilled_on: RoutingTarget | None = None
    ) -> Plan | None: ...


class Handover:
    """Starts DECODE legs of requests for which a lease is held."""

    def __init__(self, fleet: Fleet, legs: LegControl, *, plan: MakePlan) -> None:
        self._fleet = fleet
        self._legs = legs
        self._plan = plan

    def start(self, state: RequestState, now: float) -> bool:
        """Decode where that was planned, or elsewhere if that worker takes nothing any more. A PREFILL leg
        that runs goes on beside it. False, and nothing has changed, where there is no place for it."""
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
        """Whether it can be decoded where that was planned. What was planned on an earlier life of the worker
        is no longer accounted, nor may its rank exist."""
        target = state.planned.decode
        return target in state.charges and self._fleet.accepts(target.worker_id)

    def _plan_anew(self, state: RequestState, source: RoutingTarget, lease: HeldLease, now: float) -> bool:
        plan = self._plan(state, now, prefilled_on=source)
        if plan is None or plan.prefill != source:
            return False
        # The prompt's end, or a new start, is then the better moment.
        if plan.decode.worker_id in state.avoid and (state.leg is not None or lease.failed):
            return False
        self._legs.discharge(state)
        state.plan = replace(state.planned, decode=plan.decode)
        state.charges = self._fleet.commit(state.current, state.hashes, plan, now)
        return True
