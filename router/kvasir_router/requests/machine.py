"""The request machine: every request from its arrival to its one end, without I/O.

    queued ──▶ prefilling ──▶ decoding ──▶ ended        (aggregated: queued ──▶ decoding)
      ▲             │             │
      └── the leg failed, its worker was lost, or it was too slow: on another worker, from what the client
          has (see kvasir_router.requests.continuation)

A PREFILL leg may offer its KV before all of it is computed. The DECODE leg then starts beside it and pulls
while the other computes: until the prompt is done, the request is decoding in two legs.

`handle(event, now)` changes the state and returns effects. It reads no clock and waits for nothing, so that
production, tests under virtual time and trace replay run the same decisions.
"""

from __future__ import annotations

from kvasir.core.errors import CapacityError
from kvasir.core.invariants import require
from kvasir.core.media.prompts import kinds_of
from kvasir.core.requests import Request
from kvasir.native import StreamTokens
from kvasir.ports.router import Accounting
from kvasir.ports.routing import Plan
from kvasir_router.admission import UNLIMITED, Admission, AdmissionRules
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.requests.checks import check_limits, check_requests, check_work
from kvasir_router.requests.completion import Completion
from kvasir_router.requests.events import (
    AdaptersChanged,
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
    WorkerReady,
    WorkerRestored,
)
from kvasir_router.requests.failover import Failover
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.lifecycle import Lifecycle
from kvasir_router.requests.placement import NO_ROOM, Placement
from kvasir_router.requests.progress import Progress
from kvasir_router.requests.state import (
    MachineLimits,
    RequestState,
    check_arrival,
    refuse_to_wait,
)
from kvasir_router.requests.table import RequestTable

__all__ = ["MachineLimits", "RequestMachine"]


class RequestMachine(Lifecycle[RequestState, Admission]):
    """Obligations: each request whose arrival was accepted ends in exactly one Finish, Fail or Gone, with
    nothing emitted after it; tokens of a choice are emitted in order, each once; every lease that a prefill
    worker granted is released."""

    def __init__(self, fleet: Fleet, limits: MachineLimits, rules: AdmissionRules = UNLIMITED) -> None:
        table = RequestTable(fleet, limits, rules)
        legs = LegControl(table)
        completion = Completion(table, legs)
        self._placement = Placement(table, legs)
        failover = Failover(table, legs, completion, self._placement)
        super().__init__(table, completion, failover, fleet.health)
        self.fleet = fleet
        # That of Lifecycle by its own type: a compiled class cannot narrow an attribute.
        self._own_failover = failover
        self._progress = Progress(table, legs, completion, self._placement, failover)

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._admission)

    @property
    def leases(self) -> int:
        """Leases on prefill workers that requests hold."""
        return sum(state.lease is not None for state in self._states.values())

    def accounting(self) -> Accounting:
        """The accounting of what is served."""
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

    def next_wakeup(self) -> float | None:
        """When a Tick is due, on the same clock as `now`; None if nothing waits for time."""
        due = (super().next_wakeup(), self.fleet.index.next_due(), self.fleet.gap.next_due())
        return min((when for when in due if when is not None), default=None)

    def fast_path_of(self, request_id: str) -> tuple[str, str, StreamTokens] | None:
        """See RequestState.fast_path."""
        state = self._states.get(request_id)
        return None if state is None else state.fast_path()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event. Raise, for Arrived only and without any change, CapacityError (no_capacity,
        shutting_down, or the refusal of Admission) or RequestError (duplicate_request)."""
        # Before a tick, which moves the requests of workers that cannot be reached.
        opened = isinstance(event, TimerTick) and self.fleet.open_gap(now)
        if isinstance(event, StepReceived):
            self._progress.take(event.worker_id, event.batch, now)
        elif isinstance(event, MembershipEvent):
            self._membership(event, now)
        else:
            self._request(event, now)
        if self.fleet.open_gap(now) or opened:
            self._placement.unpark(now)
        if self._admission.due(now):
            self._placement.start_queued(now)
        if self.fleet.health.press(self._admission.held_back):
            self._placement.start_queued(now)
        self._admission.tick(now)
        effects = self._table.out + self.fleet.index.take_effects()
        self._table.out.clear()
        return effects

    def _request(
        self,
        event: RequestArrived
        | RequestCancelled
        | SnapshotEvent
        | TimerTick
        | PlanReceived
        | AdaptersChanged
        | ShuttingDown,
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
                if ready_in_s is not None and not self.fleet.workers and not self._states:
                    self.fleet.gap.asleep()
                self.fleet.assign(roles)
                self._placement.unpark(now)
            case AdaptersChanged(worker_id, adapters) if worker_id in self.fleet.workers:
                self.fleet.hold(worker_id, adapters)
                self._placement.unpark(now)
            case ShuttingDown():
                self._shut_down(now)

    def _membership(self, event: MembershipEvent, now: float) -> None:
        self._own_failover.handle(event, now)
        serves = isinstance(event, WorkerReady | WorkerRestored)
        if serves and event.worker_id in self.fleet.workers:
            self._placement.unpark(now)

    # -- arrival and routing ---------------------------------------------------------------------

    def _arrived(self, request: Request, now: float) -> None:
        check_arrival(request, self._states, closing=self._closing)
        if len(self._states) >= self._limits.max_in_flight:
            raise CapacityError(f"{len(self._states)} requests are in flight, the most allowed")
        admission = self._admission
        if request.resumed is None:
            # Less than it has already had cannot be generated.
            request = admission.reduced(request)
        state = RequestState(request, admission.ticket(request, now), admission.brownout.view.text)
        self._table.retries.budget.deposit()
        if state.ticket.long:
            state.hashes = self.fleet.hashes(state.current)
            state.ticket.fresh_tokens = len(state.current.tokens) - self.fleet.cached_tokens(state.hashes)
        plan = self._placement.fitting(state, now) if admission.may_begin(state.ticket, now) else NO_ROOM
        if plan is None:
            refuse_to_wait(self._ready_in_s, self._limits.queue_timeout_s, self.fleet.missing())
        if not isinstance(plan, Plan):
            admission.wait(state.ticket, now, served=plan is NO_ROOM)
        self._table.add(state)
        if isinstance(plan, Plan):
            self._placement.start(state, plan, now)
        else:
            self._table.wait_until(state, now)

    # -- membership and time ---------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._table.out += self.fleet.index.tick(now)
        super()._tick(now)

    def _check_time(self, state: RequestState, now: float) -> None:
        super()._check_time(state, now)
        if state.hedge_at is not None and state.hedge_at <= now:
            self._own_failover.hedge(state, now)

    def _unserved(self, state: RequestState) -> object | None:
        if not self._admission.parked(state.ticket):
            return None
        kinds = " and ".join(sorted(kind.plural for kind in kinds_of(state.request.media)))
        nobody = f"no worker of this model takes {kinds}" if kinds else "no worker serves this model"
        return state.last_error or self.fleet.missing() or nobody

    def validate_state(self) -> None:
        """Raise AssertionError, naming the violation, unless every invariant holds."""
        check_requests(self._states, self._admission, self._table.timers, self.fleet)
        check_work(self._states, self.fleet)
        check_limits(self._states, self._limits)
        require(self.accounting().consistent, f"the accounting is inconsistent: {self.accounting()}")
        self.fleet.index.check_integrity()
