"""From the PREFILL leg to the DECODE leg, which may begin before the other has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from kvasir.core.requests import Leg
from kvasir.ports.routing import Plan, Target
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.state import HeldLease, Phase, RequestState


class MakePlan(Protocol):
    """Decides where a request runs, given where its prompt was computed."""

    def __call__(
        self, flight: RequestState, now: float, prefilled_on: Target | None = None
    ) -> Plan | None: ...


class Handover:
    """Starts DECODE legs of requests for which a lease is held."""

    def __init__(self, fleet: Fleet, legs: LegControl, *, plan: MakePlan) -> None:
        self._fleet = fleet
        self._legs = legs
        self._plan = plan

    def start(self, flight: RequestState, now: float) -> bool:
        """Decode where that was planned, or elsewhere if that worker takes nothing any more. A PREFILL leg
        that runs goes on beside it. False, and nothing has changed, where there is no place for it."""
        lease = flight.lease
        if lease is None:
            raise AssertionError("nothing to hand over")
        source = flight.planned.prefill_target
        if not self._as_planned(flight) and not self._plan_anew(flight, source, lease, now):
            return False
        if flight.leg is None:
            self._legs.prefilled(flight, source, now, leaves=True)
        flight.ahead, flight.leg = flight.leg, None
        flight.phase = Phase.DECODING
        flight.decode_s, flight.overlap_s = now, 0.0
        self._legs.submit(flight, Leg.DECODE, flight.planned.decode, lease.handoff)
        return True

    def _as_planned(self, flight: RequestState) -> bool:
        """Whether it can be decoded where that was planned. What was planned on an earlier life of the worker
        is no longer accounted, nor may its rank exist."""
        target = flight.planned.decode
        return target in flight.charges and self._fleet.accepts(target.worker_id)

    def _plan_anew(self, flight: RequestState, source: Target, lease: HeldLease, now: float) -> bool:
        plan = self._plan(flight, now, prefilled_on=source)
        if plan is None or plan.prefill != source:
            return False
        # The prompt's end, or a new start, is then the better moment.
        if plan.decode.worker_id in flight.avoid and (flight.leg is not None or lease.failed):
            return False
        self._legs.discharge(flight)
        flight.plan = replace(flight.planned, decode=plan.decode)
        flight.charges = self._fleet.commit(flight.current, flight.hashes, plan, now)
        return True
