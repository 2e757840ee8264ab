"""The table of a machine's requests, which all parts of the machine share.

A part gets this table and the parts that it calls, in the order legs, completion, placement, failover,
progress; no part calls one that comes after it.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvasir.core.errors import RequestError
from kvasir.core.requests import Request
from kvasir.ports.router import RequestSummary, RunningView
from kvasir_router.admission import Admission, AdmissionRules, AdmissionTicket
from kvasir_router.admission.fair_admission import FairAdmission
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.fleet.health import FleetHealth
from kvasir_router.requests.events import Effect
from kvasir_router.requests.restarts import Restartable, RetryAccounting
from kvasir_router.requests.state import MachineLimits, RequestState
from kvasir_router.requests.timers import Timers


class Tracked(Restartable, Protocol):
    """A request in a table. `queued_until` is set while it waits for a worker."""

    request: Request
    ticket: AdmissionTicket
    queued_until: float | None

    def summary(self, outcome: str, now: float) -> RequestSummary: ...

    def overdue(self, now: float) -> RequestError: ...

    def view(self, now: float) -> RunningView: ...


State = TypeVar("State", bound=Tracked)
Admits = TypeVar("Admits", bound=FairAdmission)


class Table(Generic[State, Admits]):
    """Requests that have not ended, by id, with their queue, timers and retries. `out` has the effects of the
    event that is being handled."""

    def __init__(self, admission: Admits, limits: MachineLimits, health: FleetHealth) -> None:
        self.limits = limits
        self.admission = admission
        self.states: dict[str, State] = {}
        self.timers = Timers()
        self.retries = RetryAccounting(limits, health)
        self.out: list[Effect] = []

    def add(self, state: State) -> None:
        """Add a request that was admitted, and set the timer of its deadline."""
        request = state.request
        self.states[request.request_id] = state
        self.timers.sweep(self.states)
        if request.deadline_s is not None:
            self.timers.set(request.deadline_s, request.request_id)

    def wait_until(self, state: State, now: float) -> None:
        """Let a request wait for a worker, for at most the queue timeout."""
        state.queued_until = now + self.limits.queue_timeout_s
        self.timers.set(state.queued_until, state.request.request_id)

    def remove(self, state: State) -> None:
        """Remove a request that ends, and count it out of admission."""
        self.admission.ended(state.ticket)
        del self.states[state.request.request_id]


class RequestTable(Table[RequestState, Admission]):
    """The table of requests that generate."""

    def __init__(self, fleet: Fleet, limits: MachineLimits, rules: AdmissionRules) -> None:
        super().__init__(Admission(fleet, rules), limits, fleet.health)
        self.fleet = fleet
