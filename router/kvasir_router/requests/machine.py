"""The request machine: every request from its arrival to its one end, without I/O.

    queued ──▶ prefilling ──▶ decoding ──▶ ended        (aggregated: queued ──▶ decoding)
      ▲             │             │
      └── the leg failed, its worker was lost, or nothing came of it in time: elsewhere, from what the client
          has (see kvasir_router.requests.continuation)

A PREFILL leg may offer its KV before all of it is computed. The DECODE leg then starts beside it and pulls
while the other computes: until the prompt is done, the request is decoding in two legs.

`handle(event, now)` changes the state and returns what is to be done about it. It reads no clock and
waits for nothing, so that production, tests under virtual time and trace replay run the same decisions.
"""

from __future__ import annotations

from kvasir.core.errors import CapacityError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.invariants import require
from kvasir.core.requests import Request
from kvasir.ports.router import Accounting, AdmissionView, BrownoutView, Lane
from kvasir.ports.routing import Plan
from kvasir_router.admission import UNLIMITED, AdmissionRules
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.requests.checks import check_limits, check_requests, check_work
from kvasir_router.requests.completion import Completion
from kvasir_router.requests.events import (
    Effect,
    Event,
    MembershipEvent,
    PlanReceived,
    RequestArrived,
    RequestCancelled,
    ShuttingDown,
    SnapshotEnded,
    SnapshotEvent,
    SnapshotPart,
    StepReceived,
    TimerTick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
    WorkerRestored,
)
from kvasir_router.requests.failover import Failover
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.placement import NO_ROOM, Placement
from kvasir_router.requests.progress import Progress
from kvasir_router.requests.state import (
    MachineLimits,
    RequestState,
    check_arrival,
    refuse_to_wait,
    waited_for_nothing,
)
from kvasir_router.requests.table import RequestTable

__all__ = ["MachineLimits", "RequestMachine"]


class RequestMachine:
    """Obligations: each request whose arrival was accepted ends in exactly one Finish, Fail or Gone,
    with nothing emitted after it; tokens of a choice are emitted in order, each once; every lease that
    a prefill worker granted is released."""

    def __init__(self, fleet: Fleet, limits: MachineLimits, rules: AdmissionRules = UNLIMITED) -> None:
        self.fleet = fleet
        self._limits = limits
        self._table = table = RequestTable(fleet, limits, rules)
        self._states = table.states
        self._admission = table.admission
        self._timers = table.timers
        self._closing = False
        self._ready_in_s: float | None = None
        self._legs = LegControl(table)
        self._completion = Completion(table, self._legs)
        self._placement = Placement(table, self._legs)
        self._failover = Failover(table, self._legs, self._completion, self._placement)
        self._progress = Progress(table, self._legs, self._completion, self._placement, self._failover)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._admission)

    @property
    def leases(self) -> int:
        """Leases on prefill workers that requests hold."""
        return sum(state.lease is not None for state in self._states.values())

    def accounting(self) -> Accounting:
        """What is served, and what is accounted for it."""
        states = self._states.values()
        return Accounting(
            in_flight=len(self._states),
            running=len({one for worker in self.fleet.workers.values() for one in worker.legs.values()}),
            queued=len(self._admission),
            accounted=sum(bool(state.charges) for state in states),
            leases=self.leases,
        )

    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return sum(len(self._states[request_id].request.tokens) for request_id in self._admission)

    @property
    def brownout(self) -> BrownoutView:
        """What is done under pressure."""
        return self._admission.brownout.view

    def admission(self, now: float) -> AdmissionView:
        """What waits, and what is done about it."""
        return self._admission.view(now)

    def next_wakeup(self) -> float | None:
        """When a Tick is due, on the same clock as `now`; None when nothing waits for time."""
        due = (
            self._timers.next(),
            self.fleet.index.next_due(),
            self.fleet.health.next_due(),
            self._failover.next_due(),
            self._admission.next_due(),
        )
        return min((when for when in due if when is not None), default=None)

    def take_fast_path(self, request_id: str, lane: Lane) -> tuple[str, str, int] | None:
        """See Flight.go_straight."""
        state = self._states.get(request_id)
        return None if state is None else state.take_fast_path(lane)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event. Raises, for Arrived only and then without any change, CapacityError
        (no_capacity, shutting_down, or what Admission refuses with) or RequestError (duplicate_request)."""
        if isinstance(event, StepReceived):
            self._progress.take(event.worker_id, event.batch, now)
        elif isinstance(event, MembershipEvent):
            self._membership(event, now)
        else:
            self._request(event, now)
        if self._admission.due(now):
            self._placement.start_queued(now)
        self._admission.tick(now)
        effects = self._table.out + self.fleet.index.take_effects()
        self._table.out.clear()
        return effects

    def _request(
        self,
        event: RequestArrived | RequestCancelled | SnapshotEvent | TimerTick | PlanReceived | ShuttingDown,
        now: float,
    ) -> None:
        match event:
            case SnapshotPart(worker_id, attempt, part):
                self.fleet.index.snapshot_part(worker_id, attempt, part, now)
            case SnapshotEnded(worker_id, attempt, error, final):
                self.fleet.index.snapshot_ended(worker_id, attempt, error, now, final=final)
            case RequestArrived(request):
                self._arrived(request, now)
            case RequestCancelled(request_id, outcome):
                self._cancelled(request_id, outcome, now)
            case TimerTick():
                self._tick(now)
            case PlanReceived(roles, ready_in_s):
                self._ready_in_s = ready_in_s
                self.fleet.assign(roles)
                self._placement.unpark(now)
            case ShuttingDown():
                self._shut_down(now)

    def _membership(self, event: MembershipEvent, now: float) -> None:
        known = event.worker_id in self.fleet.workers
        match event:
            case WorkerReady(worker_id, identity):
                self._ready(worker_id, identity, now)
            case WorkerLost(worker_id, reason):
                self._failover.lost(worker_id, reason, now)
            case WorkerInterrupted(worker_id) if known:
                self._failover.interrupted(worker_id, now)
            case WorkerDraining(worker_id, reason) if known:
                self.fleet.mark(worker_id, draining=reason)
            case WorkerRestored(worker_id) if known:
                self.fleet.mark(worker_id, draining="")
                self._placement.unpark(now)

    # -- arrival and routing ---------------------------------------------------------------------

    def _arrived(self, request: Request, now: float) -> None:
        check_arrival(request, self._states, closing=self._closing)
        if len(self._states) >= self._limits.max_in_flight:
            raise CapacityError(f"{len(self._states)} requests are in flight, the most allowed")
        admission = self._admission
        request = admission.reduced(request)
        state = RequestState(request, admission.ticket(request, now), admission.brownout.view.text)
        self._table.retries.budget.deposit()
        if state.ticket.long:
            state.hashes = self.fleet.hashes(request)
            state.ticket.fresh_tokens = len(request.tokens) - self.fleet.cached_tokens(state.hashes)
        plan = self._placement.fitting(state, now) if admission.may_begin(state.ticket, now) else NO_ROOM
        if plan is None:
            refuse_to_wait(self._ready_in_s, self._limits.queue_timeout_s, self.fleet.missing())
        if not isinstance(plan, Plan):
            admission.wait(state.ticket, now, served=plan is NO_ROOM)
        self._states[request.request_id] = state
        self._timers.sweep(self._states)
        if request.deadline_s is not None:
            self._timers.set(request.deadline_s, request.request_id)
        if isinstance(plan, Plan):
            self._placement.start(state, plan, now)
        else:
            self._table.wait_until(state, now)

    # -- membership and time ---------------------------------------------------------------------

    def _ready(self, worker_id: str, identity: WorkerIdentity, now: float) -> None:
        known = self.fleet.workers.get(worker_id)
        if known is not None and known.identity != identity:
            self._failover.lost(worker_id, "replaced by another life of the worker", now)
            known = None
        if known is None:
            self.fleet.add(worker_id, identity, now)
        else:
            self._failover.resumed(worker_id, now)
        self._placement.unpark(now)

    def _tick(self, now: float) -> None:
        self._table.out += self.fleet.index.tick(now)
        self.fleet.health.tick(now)
        self._failover.tick(now)
        for request_id in self._timers.due(now):
            state = self._states.get(request_id)
            if state is not None:
                self._check_time(state, now)
        self._legs.forget_ghosts(now)

    def _check_time(self, state: RequestState, now: float) -> None:
        deadline = state.request.deadline_s
        if deadline is not None and deadline <= now:
            self._completion.fail(state, state.overdue(now), now)
        elif state.queued_until is not None and state.queued_until <= now:
            why = state.last_error or self.fleet.missing() or "no worker serves this model"
            waited_s = self._limits.queue_timeout_s
            if self._admission.parked(state.ticket):
                error = waited_for_nothing(waited_s, why, self._ready_in_s)
            else:
                error = self._admission.waits.no_room(state.ticket, waited_s, now)
            self._completion.fail(state, error, now)
        elif state.hedge_at is not None and state.hedge_at <= now:
            self._failover.hedge(state, now)

    def _shut_down(self, now: float) -> None:
        self._closing = True
        for state in list(self._states.values()):
            self._completion.fail(state, CapacityError("the router is stopping", code="shutting_down"), now)

    def _cancelled(self, request_id: str, outcome: str, now: float) -> None:
        state = self._states.get(request_id)
        if state is not None:
            self._completion.cancel(state, outcome, now)

    def validate_state(self) -> None:
        """Raises AssertionError, naming what is wrong, unless every invariant holds."""
        check_requests(self._states, self._admission, self._timers, self.fleet)
        check_work(self._states, self.fleet)
        check_limits(self._states, self._limits)
        require(self.accounting().consistent, f"the accounting is inconsistent: {self.accounting()}")
        self.fleet.index.check_integrity()
