"""Requests whose leg failed, whose worker was lost or fell silent, or of which nothing came: on elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvasir.core.errors import KvasirError, UpstreamError
from kvasir.core.requests import Leg
from kvasir.ports.routing import Plan
from kvasir_router.fleet import Fleet
from kvasir_router.machine_ends import Ends
from kvasir_router.machine_legs import Legs
from kvasir_router.machine_state import Flight, MachineLimits

LEAST_PATIENCE_S = 0.25
ENGINE_DEAD = "engine_dead"
"""What a worker says in its last moments, of everything that ran there."""


class Elsewhere:
    """Moves requests; `foresee` tells where one would go, `route` starts or queues one that holds nothing.

    A worker that cannot be reached keeps its requests for `migrate_s`: most connections come back in less,
    and with them everything that ran."""

    def __init__(
        self,
        fleet: Fleet,
        legs: Legs,
        ends: Ends,
        limits: MachineLimits,
        *,
        flights: Mapping[str, Flight],
        foresee: Callable[[Flight, float], Plan | None],
        route: Callable[[Flight, float], None],
    ) -> None:
        self._fleet = fleet
        self._legs = legs
        self._ends = ends
        self._limits = limits
        self._flights = flights
        self._foresee = foresee
        self._route = route
        # Workers whose connection is broken, and when their requests go on elsewhere.
        self._evacuations: dict[str, float] = {}

    def next_due(self) -> float | None:
        """When `tick` is due."""
        return min(self._evacuations.values(), default=None)

    def tick(self, now: float) -> None:
        """Evacuate the workers whose time has come."""
        for worker_id in [worker_id for worker_id, when in self._evacuations.items() if when <= now]:
            self._evacuate(worker_id, now)

    def interrupted(self, worker_id: str, now: float) -> None:
        """The worker's connection broke. One that was leaving anyway does not come back."""
        self._fleet.mark(worker_id, interrupted=True, now=now)
        leaving = bool(self._fleet.workers[worker_id].draining)
        self._evacuations[worker_id] = now if leaving else now + self._limits.migrate_s
        if leaving:
            self._evacuate(worker_id, now)

    def resumed(self, worker_id: str, now: float) -> None:
        """The connection is back, and with it what still runs there."""
        self._evacuations.pop(worker_id, None)
        self._fleet.mark(worker_id, interrupted=False, now=now)

    def lost(self, worker_id: str, reason: str, now: float) -> None:
        """The worker is gone, with everything on it."""
        worker = self._fleet.remove(worker_id)
        if worker is None:
            return
        self._evacuations.pop(worker_id, None)
        self._legs.lost(self._flights.values(), worker_id)
        error = UpstreamError(f"worker {worker_id} was lost: {reason}", code="worker_lost")
        for request_id in worker.legs.values():
            flight = self._flights[request_id]
            flight.leg = None
            self.again_or_fail(flight, error, worker_id, now, lost=True)

    def again_or_fail(
        self, flight: Flight, error: KvasirError, worker_id: str, now: float, *, lost: bool = False
    ) -> None:
        """The leg is over and has failed on `worker_id`, or went with it or its engine."""
        lost = lost or error.code == ENGINE_DEAD
        self._legs.release(flight)
        self._legs.discharge(flight)
        flight.last_error = error
        if not lost:
            self._ends.blame(worker_id, error, now)
        refusal = self._ends.refusal(flight, error, lost=lost)
        if refusal is not None:
            self._ends.fail(flight, refusal, now)
            return
        flight.avoid.add(worker_id)
        flight.forget_attempt()
        self._route(flight, now)

    def hedge(self, flight: Flight, now: float) -> None:
        """Nothing came of the request in many times what was foreseen: take it back and start it where it has
        not been, once, if there is such a place and the budget allows."""
        flight.hedge_at = None
        leg = flight.leg
        if leg is None or flight.streaming or leg.kind is Leg.DECODE:
            return
        flight.avoid.add(leg.target.worker_id)
        plan = self._foresee(flight, now)
        if plan is None or {plan.decode.worker_id, plan.prefill_target.worker_id} & flight.avoid:
            return
        if not self._ends.budget.withdraw():
            return
        flight.hedged = True
        slowness = flight.slowness(now)
        if slowness is not None:
            # It has not answered at all, and must not look well for that.
            self._fleet.late(leg.target.worker_id, now, slowness)
        self._legs.stop(flight, now)
        self._legs.discharge(flight)
        flight.forget_attempt()
        self._route(flight, now)

    def _evacuate(self, worker_id: str, now: float) -> None:
        """What runs there goes on elsewhere, or stays while there is no elsewhere."""
        error = UpstreamError(f"worker {worker_id} cannot be reached", code="worker_lost")
        for request_id in list(self._fleet.workers[worker_id].legs.values()):
            flight = self._flights[request_id]
            if self._foresee(flight, now) is not None:
                self._legs.stop(flight, now)
                self.again_or_fail(flight, error, worker_id, now, lost=True)
        if self._fleet.workers[worker_id].legs:
            self._evacuations[worker_id] = now + max(self._limits.migrate_s, LEAST_PATIENCE_S)
        else:
            del self._evacuations[worker_id]
