"""Requests for embeddings, from their arrival to their one end, without I/O.

    queued ──▶ running ──▶ ended
      ▲           │
      └── the leg failed, or its worker was lost: elsewhere, from the start, which loses nothing

A machine of its own beside RequestMachine: of all that the other one keeps (hand-overs, leases, an index of
prefixes, output that the client has) nothing exists here. An embedding can always be made again, so that the
whole of recovery is to run it elsewhere.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.invariants import require
from kvasir.core.requests import Delta, EngineRequest, Leg, Request, StepBatch, Usage
from kvasir.ports.router import Accounting, AdmissionView, BrownoutView, RequestSummary
from kvasir_router.admission import UNLIMITED, AdmissionRules
from kvasir_router.embeddings.admission import EmbeddingAdmission
from kvasir_router.embeddings.checks import check_inputs, check_work
from kvasir_router.embeddings.fleet import EmbeddingFleet
from kvasir_router.embeddings.state import EmbeddingRequestState
from kvasir_router.fleet.work import Worker
from kvasir_router.requests.completion import BLAMELESS
from kvasir_router.requests.events import (
    AbortOn,
    ClientGone,
    Effect,
    EmitDelta,
    Event,
    FailRequest,
    FinishRequest,
    PlanReceived,
    RequestArrived,
    RequestCancelled,
    ShuttingDown,
    StepReceived,
    SubmitTo,
    TimerTick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
    WorkerRestored,
)
from kvasir_router.requests.failover import ENGINE_DEAD, LEAST_PATIENCE_S
from kvasir_router.requests.legs import FAILED
from kvasir_router.requests.restarts import RetryAccounting
from kvasir_router.requests.state import (
    MachineLimits,
    check_arrival,
    error_of,
    refuse_to_wait,
    waited_for_nothing,
)
from kvasir_router.requests.timers import Timers


class EmbeddingMachine:
    """Obligations: each request whose arrival was accepted ends in exactly one Finish, Fail or Gone, with
    nothing emitted after it; before a Finish exactly one delta is emitted, which has the embedding. What has
    to go elsewhere is sent before what has not begun, of which EmbeddingAdmission knows the order."""

    def __init__(
        self, fleet: EmbeddingFleet, limits: MachineLimits, rules: AdmissionRules = UNLIMITED
    ) -> None:
        self.fleet = fleet
        self._limits = limits
        self._states: dict[str, EmbeddingRequestState] = {}
        self._admission = EmbeddingAdmission(rules)
        self._moving: list[tuple[int, int, str]] = []
        self._timers = Timers()
        self._evacuations: dict[str, float] = {}
        self._restarts = RetryAccounting(
            max_retries=limits.max_retries,
            max_migrations=limits.max_migrations,
            budget_ratio=limits.retry_budget,
        )
        self._arrivals = 0
        self._closing = False
        self._awake_in_s: float | None = None
        self._out: list[Effect] = []

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._admission) + len(self._moving)

    def waiting(self) -> list[frozenset[str]]:
        """Which workers each of those avoids, since it failed there; for checks."""
        return [frozenset(state.avoid) for state in self._states.values() if state.waits]

    def waiting_tokens(self) -> int:
        """Tokens of the inputs that wait."""
        return sum(len(state.request.tokens) for state in self._states.values() if state.waits)

    @property
    def brownout(self) -> BrownoutView:
        """What is done under pressure."""
        return self._admission.brownout.view

    def admission(self, now: float) -> AdmissionView:
        """What waits, and what is done about it."""
        return self._admission.view(now)

    def accounting(self) -> Accounting:
        """What is served, and what is accounted for it."""
        running = sum(len(worker.legs) for worker in self.fleet.workers.values())
        accounted = sum(state.worker_id is not None for state in self._states.values())
        return Accounting(len(self._states), running, self.queued, accounted, leases=0)

    def next_wakeup(self) -> float | None:
        """When a Tick is due, on the same clock as `now`; None when nothing waits for time."""
        due = (
            self._timers.next(),
            min(self._evacuations.values(), default=None),
            self.fleet.health.next_due(),
            self._admission.next_due(),
        )
        return min((when for when in due if when is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event. Raises, for Arrived only and then without any change, CapacityError (queue_full,
        shutting_down, or what EmbeddingAdmission refuses with) or RequestError (duplicate_request)."""
        match event:
            case StepReceived(worker_id, batch):
                self._step(worker_id, batch, now)
            case RequestArrived(request):
                self._arrived(request, now)
            case RequestCancelled(request_id, outcome):
                self._cancelled(request_id, outcome, now)
            case TimerTick():
                self._tick(now)
            case PlanReceived(_, ready_in_s):
                self._awake_in_s = ready_in_s
            case ShuttingDown():
                self._shut_down(now)
            case _:
                self._membership(event, now)
        self._start_waiting(now)
        self._admission.tick(now)
        effects, self._out = self._out, []
        return effects

    def _membership(self, event: Event, now: float) -> None:
        """Of the rest, snapshots of caches are never asked for."""
        match event:
            case WorkerReady(worker_id, identity):
                self._ready(worker_id, identity, now)
            case WorkerLost(worker_id, reason):
                self._lost(worker_id, reason, now)
            case WorkerInterrupted(worker_id) if worker_id in self.fleet.workers:
                self._interrupted(worker_id, now)
            case WorkerDraining(worker_id, reason) if worker_id in self.fleet.workers:
                self.fleet.mark(worker_id, now, draining=reason)
            case WorkerRestored(worker_id) if worker_id in self.fleet.workers:
                self.fleet.mark(worker_id, now, draining="")
        self._admission.resized(self.fleet.ready)

    # -- arrival ---------------------------------------------------------------------------------

    def _arrived(self, request: Request, now: float) -> None:
        check_arrival(request, self._states, closing=self._closing)
        if len(self._states) >= self._limits.max_in_flight:
            raise CapacityError(
                f"{len(self._states)} inputs wait or are being embedded, the most allowed", code="queue_full"
            )
        request = self._admission.reduced(request)
        ticket = self._admission.ticket(request, now)
        worker_id = None if self.queued else self.fleet.choose(now)
        if worker_id is None:
            missing = self.fleet.missing()
            if missing is not None:
                refuse_to_wait(self._awake_in_s, self._limits.queue_timeout_s, missing)
            self._admission.wait(ticket, now, served=missing is None)
        self._arrivals += 1
        self._restarts.budget.deposit()
        state = EmbeddingRequestState(request, ticket, self._arrivals, brownout=self.brownout.text)
        self._states[request.request_id] = state
        if request.deadline_s is not None:
            self._timers.set(request.deadline_s, request.request_id)
        if worker_id is None:
            self._waits(state, now)
        else:
            self._start(state, worker_id, now)

    def _waits(self, state: EmbeddingRequestState, now: float) -> None:
        state.waits, state.queued_until = True, now + self._limits.queue_timeout_s
        self._timers.sweep(self._states)
        self._timers.set(state.queued_until, state.request.request_id)

    def _start_waiting(self, now: float) -> None:
        """Send what waits, as long as there is room for it."""
        self._start_moving(now)
        while (ticket := self._admission.next()) is not None:
            worker_id = self.fleet.choose(now)
            if worker_id is None:
                return
            self._start(self._states[ticket.request_id], worker_id, now)

    def _start_moving(self, now: float) -> None:
        """What has failed somewhere waits for another place, and lets others pass."""
        for entry in list(self._moving):
            state = self._states[entry[2]]
            avoid = state.avoid & self.fleet.workers.keys()
            worker_id = self.fleet.choose(now, avoid)
            if worker_id is not None:
                self._moving.remove(entry)
                self._start(state, worker_id, now)
            elif not avoid:
                return

    def _start(self, state: EmbeddingRequestState, worker_id: str, now: float) -> None:
        request, worker = state.request, self.fleet.workers[worker_id]
        leg_id = worker.free_leg_id(request.request_id, state.starts)
        state.worker_id, state.leg_id = worker_id, leg_id
        state.waits = False
        state.starts += 1
        self._admission.begins(state.ticket, now)
        state.started_s = now
        state.routed_s = now if state.routed_s is None else state.routed_s
        self.fleet.charge(worker_id, leg_id, request.request_id, state.tokens, now)
        leg = EngineRequest(
            request_id=leg_id,
            tokens=request.tokens,
            sampling=request.sampling,
            leg=Leg.EMBED,
            adapter=request.adapter,
            salt=request.salt,
            priority=request.priority,
            trace_context=request.trace_context,
        )
        self._out.append(SubmitTo(worker_id, leg))

    # -- what workers say ------------------------------------------------------------------------

    def _step(self, worker_id: str, batch: StepBatch, now: float) -> None:
        worker = self.fleet.workers.get(worker_id)
        if worker is None:
            return
        for delta in batch.deltas:
            if delta.last:
                self._ended(worker, delta, now)
        if batch.load is not None:
            self.fleet.report(worker_id, batch.load)

    def _ended(self, worker: Worker, delta: Delta, now: float) -> None:
        request_id = worker.legs.get(delta.request_id)
        if request_id is None:
            worker.ghosts.pop(delta.request_id, None)
            return
        state = self._states[request_id]
        self._release(state, now, aborted=False)
        if delta.finish in FAILED or delta.embedding is None:
            self._failover(state, error_of(delta), worker.worker_id, now)
            return
        self.fleet.health.succeeded(worker.worker_id, now)
        state.worker_id, state.done_s = worker.worker_id, now
        state.usage = delta.usage or Usage(prompt_tokens=state.tokens)
        self._admission.first_token(state.ticket, now - state.started_s)
        self._admission.ended(state.ticket)
        del self._states[request_id]
        if delta.request_id != request_id:
            delta = replace(delta, request_id=request_id)
        self._out.append(EmitDelta(request_id, delta))
        self._out.append(FinishRequest(request_id, state.summary("ok", now)))

    def _release(self, state: EmbeddingRequestState, now: float, *, aborted: bool) -> None:
        """Nothing of the request runs any more."""
        if state.worker_id is not None:
            self.fleet.discharge(state.worker_id, state.leg_id, state.tokens, now, aborted=aborted)
            if aborted:
                self._out.append(AbortOn(state.worker_id, (state.leg_id,)))
            state.worker_id = None

    def _failover(
        self,
        state: EmbeddingRequestState,
        error: KvasirError,
        worker_id: str,
        now: float,
        *,
        lost: bool = False,
    ) -> None:
        """A leg is over and has failed: once more, on another worker, if that is within bounds."""
        lost = lost or error.code == ENGINE_DEAD
        if not lost and not isinstance(error, RequestError) and error.code not in BLAMELESS:
            self.fleet.health.failed(worker_id, error.code, now)
        state.last_error = error
        if isinstance(error, RequestError) or not self._restarts.counted(state, error, moved=lost):
            self._fail(state, error, now)
            return
        state.avoid.add(worker_id)
        insort(self._moving, self._entry(state))
        self._waits(state, now)

    @staticmethod
    def _entry(state: EmbeddingRequestState) -> tuple[int, int, str]:
        """Of what moves, the most urgent goes first, then what came first."""
        return state.request.priority, state.order, state.request.request_id

    # -- ends ------------------------------------------------------------------------------------

    def _fail(self, state: EmbeddingRequestState, error: KvasirError, now: float) -> None:
        summary = self._remove(state, error.code, now)
        self._out.append(FailRequest(state.request.request_id, error, summary))

    def _cancelled(self, request_id: str, outcome: str, now: float) -> None:
        state = self._states.get(request_id)
        if state is not None:
            summary = self._remove(state, outcome, now)
            self._out.append(ClientGone(request_id, summary))

    def _remove(self, state: EmbeddingRequestState, outcome: str, now: float) -> RequestSummary:
        summary = state.summary(outcome, now)
        request_id = state.request.request_id
        if state.waits and state.ticket.holds:
            self._moving.remove(self._entry(state))
        self._admission.ended(state.ticket)
        self._release(state, now, aborted=True)
        del self._states[request_id]
        return summary

    def _shut_down(self, now: float) -> None:
        self._closing = True
        for state in list(self._states.values()):
            self._fail(state, CapacityError("the router is stopping", code="shutting_down"), now)

    # -- membership and time ---------------------------------------------------------------------

    def _ready(self, worker_id: str, identity: WorkerIdentity, now: float) -> None:
        known = self.fleet.workers.get(worker_id)
        if known is not None and known.identity != identity:
            self._lost(worker_id, "replaced by another life of the worker", now)
            known = None
        if known is None:
            self.fleet.add(worker_id, identity, now)
        else:
            self._evacuations.pop(worker_id, None)
            self.fleet.mark(worker_id, now, interrupted=False)

    def _interrupted(self, worker_id: str, now: float) -> None:
        """The worker's connection broke. One that was leaving anyway does not come back."""
        self.fleet.mark(worker_id, now, interrupted=True)
        leaving = bool(self.fleet.workers[worker_id].draining)
        self._evacuations[worker_id] = now if leaving else now + self._limits.migrate_s

    def _lost(self, worker_id: str, reason: str, now: float) -> None:
        worker = self.fleet.remove(worker_id)
        if worker is None:
            return
        self._evacuations.pop(worker_id, None)
        error = UpstreamError(f"worker {worker_id} was lost: {reason}", code="worker_lost")
        for request_id in worker.legs.values():
            state = self._states[request_id]
            state.worker_id = None
            self._failover(state, error, worker_id, now, lost=True)

    def _evacuate(self, worker_id: str, now: float) -> None:
        """What runs there goes on elsewhere, or stays while there is no elsewhere."""
        worker = self.fleet.workers[worker_id]
        if not self.fleet.missing():
            error = UpstreamError(f"worker {worker_id} cannot be reached", code="worker_lost")
            for request_id in list(worker.legs.values()):
                state = self._states[request_id]
                self._release(state, now, aborted=True)
                self._failover(state, error, worker_id, now, lost=True)
        if worker.legs:
            self._evacuations[worker_id] = now + max(self._limits.migrate_s, LEAST_PATIENCE_S)
        else:
            del self._evacuations[worker_id]

    def _tick(self, now: float) -> None:
        self.fleet.health.tick(now)
        for worker_id in [worker_id for worker_id, when in self._evacuations.items() if when <= now]:
            self._evacuate(worker_id, now)
        for request_id in self._timers.due(now):
            state = self._states.get(request_id)
            if state is not None:
                self._check_time(state, now)
        for worker in self.fleet.workers.values():
            worker.forget_ghosts(now - self._limits.ghost_ttl_s)

    def _check_time(self, state: EmbeddingRequestState, now: float) -> None:
        deadline = state.request.deadline_s
        if deadline is not None and deadline <= now:
            took = now - state.request.arrival_s
            message = f"the input was not embedded after {took:.1f} s"
            self._fail(state, RequestError(message, status=504, code="request_timeout"), now)
        elif state.waits and state.queued_until <= now:
            waited_s = self._limits.queue_timeout_s
            why = state.last_error or self.fleet.missing()
            full = self._admission.waits.no_room(state.ticket, waited_s, now)
            self._fail(
                state, full if why is None else waited_for_nothing(waited_s, why, self._awake_in_s), now
            )

    # -- checks ----------------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Raises AssertionError, naming what is wrong, unless every invariant holds."""
        moving = [request_id for _, _, request_id in self._moving]
        check_inputs(self._states, self._admission, moving, self._timers, self._limits)
        check_work(self._states, self.fleet)
        require(self.accounting().consistent, f"the accounting is inconsistent: {self.accounting()}")
