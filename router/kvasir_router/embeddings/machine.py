"""The machine of requests for embeddings, without I/O.

    queued ──▶ running ──▶ ended
      ▲           │
      └── the leg failed, or its worker was lost: failover, from the start, which loses nothing

It is separate from RequestMachine because nothing of that one's state applies: hand-offs, leases, a prefix
index, output that the client has. An embedding can always be recomputed, so recovery is to run it on another
worker.
"""

from __future__ import annotations

from kvasir.core.errors import CapacityError
from kvasir.core.invariants import require
from kvasir.core.requests import Delta, EngineRequest, Leg, Request, StepBatch
from kvasir.ports.router import Accounting
from kvasir_router.admission import UNLIMITED, AdmissionRules
from kvasir_router.embeddings.admission import EmbeddingAdmission
from kvasir_router.embeddings.checks import check_inputs, check_work
from kvasir_router.embeddings.failover import EmbeddingCompletion, EmbeddingFailover, EmbeddingTable
from kvasir_router.embeddings.fleet import EmbeddingFleet
from kvasir_router.embeddings.state import EmbeddingRequestState
from kvasir_router.fleet.work import Worker
from kvasir_router.requests.checks import check_limits
from kvasir_router.requests.events import (
    Effect,
    Event,
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
from kvasir_router.requests.legs import FAILED
from kvasir_router.requests.lifecycle import Lifecycle
from kvasir_router.requests.state import (
    MachineLimits,
    check_arrival,
    error_of,
    refuse_to_wait,
)


class EmbeddingMachine(Lifecycle[EmbeddingRequestState, EmbeddingAdmission]):
    """Obligations: each accepted request ends in exactly one FinishRequest, FailRequest or ClientGone, with
    no effect after it; exactly one delta, with the embedding, comes before a FinishRequest. Requests that
    wait after a failure go before those that have not started, whose order EmbeddingAdmission decides."""

    def __init__(
        self, fleet: EmbeddingFleet, limits: MachineLimits, rules: AdmissionRules = UNLIMITED
    ) -> None:
        table = EmbeddingTable(fleet, limits, rules)
        completion = EmbeddingCompletion(table)
        failover = EmbeddingFailover(table, completion)
        super().__init__(table, completion, failover, fleet.health)
        self.fleet = fleet
        # Those of Lifecycle by their own types: a compiled class cannot narrow an attribute.
        self._own_table = table
        self._own_completion = completion
        self._own_failover = failover
        self._arrivals = 0

    @property
    def queued(self) -> int:
        """Number of requests that wait for a worker."""
        return len(self._admission) + len(self._own_table.moving)

    def waiting(self) -> list[frozenset[str]]:
        """Return the workers that each waiting request avoids after a failure there; for checks."""
        return [frozenset(state.avoid) for state in self._states.values() if state.waits]

    def waiting_tokens(self) -> int:
        """Tokens of the inputs that wait."""
        return sum(len(state.request.tokens) for state in self._states.values() if state.waits)

    def accounting(self) -> Accounting:
        """Return the requests served, and the work accounted for them."""
        running = sum(len(worker.legs) for worker in self.fleet.workers.values())
        accounted = sum(state.worker_id is not None for state in self._states.values())
        return Accounting(len(self._states), running, self.queued, accounted, leases=0)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event and return its effects. Raises, for RequestArrived only and without any change,
        CapacityError (queue_full, shutting_down, or a refusal of EmbeddingAdmission) or RequestError
        (duplicate_request)."""
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
                self._ready_in_s = ready_in_s
            case ShuttingDown():
                self._shut_down(now)
            case WorkerReady() | WorkerInterrupted() | WorkerDraining() | WorkerRestored() | WorkerLost():
                self._own_failover.handle(event, now)
                self._admission.resized(self.fleet.ready)
        self._start_waiting(now)
        if self.fleet.health.press(self.queued > 0):
            self._start_waiting(now)
        self._admission.tick(now)
        effects = self._own_table.out.copy()
        self._own_table.out.clear()
        return effects

    # -- arrival ---------------------------------------------------------------------------------

    def _arrived(self, request: Request, now: float) -> None:
        check_arrival(request, self._states, closing=self._closing)
        if len(self._states) >= self._limits.max_in_flight:
            raise CapacityError(
                f"{len(self._states)} inputs are in flight, which is the limit", code="queue_full"
            )
        request = self._admission.reduced(request)
        ticket = self._admission.ticket(request, now)
        worker_id = None if self.queued else self.fleet.choose(now)
        if worker_id is None:
            missing = self.fleet.missing()
            if missing is not None:
                refuse_to_wait(self._ready_in_s, self._limits.queue_timeout_s, missing)
            self._admission.wait(ticket, now, served=missing is None)
        self._arrivals += 1
        self._own_table.retries.budget.deposit()
        state = EmbeddingRequestState(request, ticket, self._arrivals, brownout=self.brownout.text)
        self._own_table.add(state)
        if worker_id is None:
            self._own_table.wait_until(state, now)
        else:
            self._start(state, worker_id, now)

    def _start_waiting(self, now: float) -> None:
        """Send queued requests while there is room."""
        self._start_moving(now)
        while (ticket := self._admission.next()) is not None:
            worker_id = self.fleet.choose(now)
            if worker_id is None:
                return
            self._start(self._states[ticket.request_id], worker_id, now)

    def _start_moving(self, now: float) -> None:
        """Send requests that wait after a failure; one that has no other worker lets the next one pass."""
        for entry in list(self._own_table.moving):
            state = self._states[entry[2]]
            avoid = state.avoid & self.fleet.workers.keys()
            worker_id = self.fleet.choose(now, avoid)
            if worker_id is not None:
                self._own_table.moving.remove(entry)
                self._start(state, worker_id, now)
            elif not avoid:
                return

    def _start(self, state: EmbeddingRequestState, worker_id: str, now: float) -> None:
        request, worker = state.request, self.fleet.workers[worker_id]
        leg_id = worker.free_leg_id(request.request_id, state.starts)
        state.worker_id, state.leg_id = worker_id, leg_id
        state.queued_until = None
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
            second_text_at=request.second_text_at,
            slo=self._limits.named_slo(request),
        )
        self._own_table.out.append(SubmitTo(worker_id, leg))

    # -- messages of workers ---------------------------------------------------------------------

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
        self._own_completion.release(state, now, aborted=False)
        if delta.finish in FAILED or delta.embedding is None:
            self._own_failover.again_or_fail(state, error_of(delta), worker.worker_id, now)
            return
        self.fleet.health.succeeded(worker.worker_id, now)
        self._own_completion.finish(state, worker.worker_id, delta, now)

    def _unserved(self, state: EmbeddingRequestState) -> object | None:
        return state.last_error or self.fleet.missing()

    # -- checks ----------------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Raise AssertionError, naming the fault, unless every invariant holds."""
        moving = [request_id for _, _, request_id in self._own_table.moving]
        check_inputs(self._states, self._admission, moving, self._own_table.timers)
        check_work(self._states, self.fleet)
        check_limits(self._states, self._limits)
        require(self.accounting().consistent, f"the accounting is inconsistent: {self.accounting()}")
