"""Where a request is to run: what the policy says, where there is room for it."""

from __future__ import annotations

from enum import Enum, auto

from kvasir.ports.routing import Plan, RoutingTarget
from kvasir_router.admission import Admission
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.requests.state import RequestState


class NoRoom(Enum):
    """Instead of a plan: workers serve the request, and none has room."""

    NO_ROOM = auto()


NO_ROOM = NoRoom.NO_ROOM


class Placement:
    """Asks the fleet for plans, and admission whether they can be had."""

    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._fleet = fleet
        self._admission = admission

    def plan(
        self,
        state: RequestState,
        now: float,
        prefilled_on: RoutingTarget | None = None,
        without: frozenset[str] = frozenset(),
    ) -> Plan | None:
        """What the policy says, without some workers if others serve; None where no worker does."""
        state.hashes = state.hashes or self._fleet.hashes(state.current)
        avoid = state.avoid | without if without else state.avoid
        return self._fleet.plan(state.current, state.hashes, now, avoid=avoid, prefilled_on=prefilled_on)

    def fitting(self, state: RequestState, now: float) -> Plan | NoRoom | None:
        """A plan whose places have room for what it takes; None where no worker serves the request."""
        plan = self.plan(state, now)
        if plan is None:
            return None
        crowded = self._admission.crowded(state.ticket, state.current, plan, now)
        if not crowded:
            return plan
        if not self._admission.takes(state.ticket):
            return NO_ROOM
        # There is a place, and this policy may insist on another one.
        return self.plan(state, now, without=crowded) or plan

    def predict(self, state: RequestState, now: float) -> Plan | None:
        """Where a request would go from where it is."""
        return self._fleet.plan(state.current, state.hashes, now, avoid=state.avoid, tentative=True)
