"""The part of a machine that does not depend on what requests compute: cancellation, time limits, shutdown.

Requests that generate and requests that embed have a machine each, which adds arrival, placement and the
messages of workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import islice
from typing import Generic

from kvasir.core.errors import CapacityError
from kvasir.ports.router import AdmissionView, BrownoutView, RunningView
from kvasir_router.fleet.health import FleetHealth
from kvasir_router.requests.completion import CompletionBase
from kvasir_router.requests.membership import Membership
from kvasir_router.requests.state import waited_for_nothing
from kvasir_router.requests.table import Admits, State, Table


class Lifecycle(ABC, Generic[State, Admits]):
    """Ends the requests of a table when they are cancelled, exceed a time limit, or the router stops."""

    def __init__(
        self,
        table: Table[State, Admits],
        completion: CompletionBase[State],
        failover: Membership,
        health: FleetHealth,
    ) -> None:
        self._table = table
        self._limits = table.limits
        self._states = table.states
        self._admission = table.admission
        self._completion = completion
        self._failover = failover
        self._health = health
        self._closing = False
        self._ready_in_s: float | None = None

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""
        return len(self._states)

    @property
    def brownout(self) -> BrownoutView:
        """The brown-out in force."""
        return self._admission.brownout.view

    def running(self, most: int, now: float) -> list[RunningView]:
        """Return the `most` requests that arrived first, of those that have not ended."""
        return [state.view(now) for state in islice(self._states.values(), most)]

    def running_request(self, request_id: str, now: float) -> RunningView | None:
        """Return a request that has not ended, else None."""
        state = self._states.get(request_id)
        return None if state is None else state.view(now)

    def admission(self, now: float) -> AdmissionView:
        """Return the state of admission."""
        return self._admission.view(now)

    def next_wakeup(self) -> float | None:
        """Return when a TimerTick is due, on the clock of `now`; None if no time is set."""
        due = (
            self._table.timers.next(),
            self._failover.next_due(),
            self._health.next_due(),
            self._admission.next_due(),
        )
        return min((when for when in due if when is not None), default=None)

    def _cancelled(self, request_id: str, outcome: str, now: float) -> None:
        state = self._states.get(request_id)
        if state is not None:
            self._completion.cancel(state, outcome, now)

    def _shut_down(self, now: float) -> None:
        self._closing = True
        for state in list(self._states.values()):
            self._completion.fail(state, CapacityError("the router is stopping", code="shutting_down"), now)

    def _tick(self, now: float) -> None:
        self._health.tick(now)
        self._failover.tick(now)
        for request_id in self._table.timers.due(now):
            state = self._states.get(request_id)
            if state is not None:
                self._check_time(state, now)
        self._failover.forget_ghosts(now)

    def _check_time(self, state: State, now: float) -> None:
        deadline, until = state.request.deadline_s, state.queued_until
        if deadline is not None and deadline <= now:
            self._completion.fail(state, state.overdue(now), now)
        elif until is not None and until <= now:
            waited_s, why = self._limits.queue_timeout_s, self._unserved(state)
            if why is None:
                error = self._admission.waits.no_room(state.ticket, waited_s, now)
            else:
                error = waited_for_nothing(waited_s, why, self._ready_in_s)
            self._completion.fail(state, error, now)

    @abstractmethod
    def _unserved(self, state: State) -> object | None:
        """Return why no worker can take a waiting request; None if workers can, and have no room."""
