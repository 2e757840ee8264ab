"""The request machine: every request from its arrival to its one end, without I/O.

    queued ──▶ prefilling ──▶ decoding ──▶ ended        (aggregated: queued ──▶ decoding)
      ▲             │             │
      └── the leg was lost or failed before a token reached the client: again elsewhere, `max_retries` times

`handle(event, now)` changes the state and returns what is to be done about it. It reads no clock and
waits for nothing, so that production, tests under virtual time and trace replay run the same decisions.
"""

from __future__ import annotations

from dataclasses import replace

from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Delta, KvHandoff, Leg, Request, StepBatch
from kvasir.ports.routing import Plan, Target
from kvasir_router.fleet import Fleet, Worker
from kvasir_router.machine_checks import check_limits, check_requests, check_work
from kvasir_router.machine_events import (
    Arrived,
    Cancelled,
    Effect,
    Emit,
    Event,
    Fail,
    Finish,
    Gone,
    MembershipEvent,
    ShuttingDown,
    SnapshotEnded,
    SnapshotEvent,
    SnapshotPart,
    Step,
    Tick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
    WorkerRestored,
)
from kvasir_router.machine_legs import FAILED, Legs, running
from kvasir_router.machine_state import (
    Flight,
    HeldLease,
    MachineLimits,
    Phase,
    Timers,
    broken_stream,
    error_of,
    waited_for_nothing,
)

__all__ = ["MachineLimits", "RequestMachine"]


class RequestMachine:
    """Obligations: each request whose arrival was accepted ends in exactly one Finish, Fail or Gone,
    with nothing emitted after it; tokens of a choice are emitted in order, each once; every lease that
    a prefill worker granted is released."""

    def __init__(self, fleet: Fleet, limits: MachineLimits) -> None:
        self.fleet = fleet
        self._limits = limits
        self._flights: dict[str, Flight] = {}
        self._queue: dict[str, None] = {}
        self._timers = Timers()
        self._closing = False
        self._out: list[Effect] = []
        self._legs = Legs(fleet, self._out, ghost_ttl_s=limits.ghost_ttl_s)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    @property
    def leases(self) -> int:
        """Leases on prefill workers that requests hold."""
        return sum(flight.lease is not None for flight in self._flights.values())

    def next_wakeup(self) -> float | None:
        """When a Tick is due, on the same clock as `now`; None when nothing waits for time."""
        timer, index = self._timers.next(), self.fleet.index.next_due()
        return timer if index is None or (timer is not None and timer <= index) else index

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event. Raises, for Arrived only and then without any change, CapacityError
        (no_capacity, queue_full, shutting_down) or RequestError (duplicate_request)."""
        if isinstance(event, Step):
            self._step(event.worker_id, event.batch, now)
        elif isinstance(event, MembershipEvent):
            self._membership(event, now)
        else:
            self._request(event, now)
        effects = self._out + self.fleet.index.take_effects()
        self._out.clear()
        return effects

    def _request(self, event: Arrived | Cancelled | SnapshotEvent | Tick | ShuttingDown, now: float) -> None:
        match event:
            case SnapshotPart(worker_id, attempt, part):
                self.fleet.index.snapshot_part(worker_id, attempt, part, now)
            case SnapshotEnded(worker_id, attempt, error, final):
                self.fleet.index.snapshot_ended(worker_id, attempt, error, now, final=final)
            case Arrived(request):
                self._arrived(request, now)
            case Cancelled(request_id, outcome):
                self._cancelled(request_id, outcome, now)
            case Tick():
                self._tick(now)
            case ShuttingDown():
                self._shut_down(now)

    def _membership(self, event: MembershipEvent, now: float) -> None:
        known = event.worker_id in self.fleet.workers
        match event:
            case WorkerReady(worker_id, identity):
                self._ready(worker_id, identity, now)
            case WorkerLost(worker_id, reason):
                self._lost(worker_id, reason, now)
            case WorkerInterrupted(worker_id) if known:
                self.fleet.mark(worker_id, interrupted=True)
            case WorkerDraining(worker_id, reason) if known:
                self.fleet.mark(worker_id, draining=reason)
            case WorkerRestored(worker_id) if known:
                self.fleet.mark(worker_id, draining="")
                self._start_queued(now)

    # -- arrival and routing ---------------------------------------------------------------------

    def _arrived(self, request: Request, now: float) -> None:
        if self._closing:
            raise CapacityError("the router is stopping", code="shutting_down")
        if request.request_id in self._flights:
            raise RequestError(
                f"request id {request.request_id} is in flight", status=409, code="duplicate_request"
            )
        if len(self._flights) >= self._limits.max_in_flight:
            raise CapacityError(f"{len(self._flights)} requests are in flight, the most allowed")
        flight = Flight(request)
        plan = self._plan(flight, now)
        if plan is None and len(self._queue) >= self._limits.max_queue:
            raise CapacityError(f"{len(self._queue)} requests wait, the most allowed", code="queue_full")
        self._flights[request.request_id] = flight
        self._timers.sweep(self._flights)
        if request.deadline_s is not None:
            self._timers.set(request.deadline_s, request.request_id)
        if plan is None:
            self._enqueue(flight, now)
        else:
            self._start(flight, plan, now)

    def _plan(self, flight: Flight, now: float, prefilled_on: Target | None = None) -> Plan | None:
        flight.hashes = flight.hashes or self.fleet.hashes(flight.request)
        return self.fleet.plan(
            flight.request, flight.hashes, now, avoid=flight.avoid, prefilled_on=prefilled_on
        )

    def _enqueue(self, flight: Flight, now: float) -> None:
        flight.queued_until = now + self._limits.queue_timeout_s
        self._queue[flight.request.request_id] = None
        self._timers.set(flight.queued_until, flight.request.request_id)

    def _start_queued(self, now: float) -> None:
        lacking = self.fleet.missing() is not None
        for request_id in list(self._queue):
            flight = self._flights[request_id]
            # Several choices run whole on one worker, which needs fewer roles than an ordinary request.
            if lacking and flight.request.sampling.n == 1:
                continue
            plan = self._plan(flight, now)
            if plan is not None:
                del self._queue[request_id]
                flight.queued_until = None
                self._start(flight, plan, now)

    def _start(self, flight: Flight, plan: Plan, now: float) -> None:
        flight.plan = plan
        flight.routed_s = now
        flight.charges = self.fleet.commit(flight.request, flight.hashes, plan, now)
        if plan.prefill is None:
            flight.phase = Phase.DECODING
            self._legs.submit(flight, Leg.FULL, plan.decode)
        else:
            flight.phase = Phase.PREFILLING
            self._legs.submit(flight, Leg.PREFILL, plan.prefill)

    # -- what workers say ------------------------------------------------------------------------

    def _step(self, worker_id: str, batch: StepBatch, now: float) -> None:
        worker = self.fleet.workers.get(worker_id)
        if worker is None:
            return
        if batch.kv is not None:
            # Before the deltas, which may end what was only foreseen.
            self.fleet.index.apply(worker_id, batch.kv, now)
        for delta in batch.deltas:
            request_id = worker.legs.get(delta.request_id)
            if request_id is None:
                self._legs.unowned(worker, delta)
                continue
            flight = self._flights[request_id]
            if flight.continues(delta):
                # Nearly every delta: the checks below, in one look.
                flight.emitted[delta.index].extend(delta.token_ids)
                self._emit(flight, delta)
            elif flight.phase is Phase.PREFILLING:
                self._prefill_delta(flight, worker, delta, now)
            else:
                self._decode_delta(flight, worker, delta, now)
        if batch.load is not None:
            self.fleet.report(worker_id, batch.load)

    def _prefill_delta(self, flight: Flight, worker: Worker, delta: Delta, now: float) -> None:
        if not delta.last:
            return
        target = self._legs.ended(flight).target
        if delta.handoff is not None:
            flight.lease = HeldLease(worker.worker_id, delta.handoff.lease_id)
        if delta.finish in FAILED or delta.handoff is None:
            self._again_or_fail(flight, error_of(delta), worker.worker_id, now)
            return
        flight.prefill_done_s = now
        flight.prefill_usage = delta.usage
        if delta.usage is not None and delta.timings is not None:
            self.fleet.measured(target, delta.usage, delta.timings, flight.charges)
        self._hand_over(flight, target, delta.handoff, now)

    def _hand_over(self, flight: Flight, source: Target, handoff: KvHandoff, now: float) -> None:
        """Decode where it was planned, or elsewhere if that worker takes nothing any more."""
        planned = flight.planned
        if self.fleet.accepts(planned.decode.worker_id):
            self._legs.prefilled(flight, source, now, leaves=True)
            flight.phase = Phase.DECODING
            self._legs.submit(flight, Leg.DECODE, planned.decode, handoff)
            return
        self._legs.discharge(flight)
        plan = self._plan(flight, now, prefilled_on=source)
        if plan is None or plan.prefill != source:
            self._legs.release(flight)
            flight.forget_attempt()
            self._route_or_wait(flight, now)
            return
        flight.plan = replace(planned, decode=plan.decode)
        flight.charges = self.fleet.commit(flight.request, flight.hashes, plan, now)
        self._hand_over(flight, source, handoff, now)

    def _decode_delta(self, flight: Flight, worker: Worker, delta: Delta, now: float) -> None:
        self._legs.release(flight)
        if delta.finish in FAILED:
            self._stop(flight, ended=delta.last, now=now)
            self._again_or_fail(flight, error_of(delta), worker.worker_id, now)
            return
        fault = flight.fault(delta)
        if fault is not None:
            self._stop(flight, ended=delta.last, now=now)
            self._fail(flight, broken_stream(worker.worker_id, fault), now)
            return
        if not flight.streaming and (delta.token_ids or delta.text or delta.finish is not None):
            flight.streaming = True
            flight.first_token_s = now
            self._legs.prefilled(flight, running(flight).target, now, leaves=False)
        flight.emitted[delta.index].extend(delta.token_ids)
        if delta.finish is not None:
            flight.finished.add(delta.index)
        if delta.last:
            self._finish(flight, delta, now)
        else:
            self._emit(flight, delta)

    def _stop(self, flight: Flight, *, ended: bool, now: float) -> None:
        if ended:
            self._legs.ended(flight)
        else:
            self._legs.stop(flight, now)

    def _emit(self, flight: Flight, delta: Delta) -> None:
        request_id = flight.request.request_id
        if delta.request_id != request_id:
            delta = replace(delta, request_id=request_id)
        self._out.append(Emit(request_id, delta))

    def _finish(self, flight: Flight, delta: Delta, now: float) -> None:
        target = self._legs.ended(flight).target
        if delta.usage is not None:
            flight.usage = flight.merged(delta.usage)
            self.fleet.reconcile(flight.request, flight.planned, flight.usage, now)
        if delta.timings is not None:
            flight.timings = delta.timings
            if delta.usage is not None:
                self.fleet.measured(target, delta.usage, delta.timings, flight.charges)
        self._emit(flight, replace(delta, usage=flight.usage, handoff=None))
        self._remove(flight)
        self._out.append(Finish(flight.request.request_id, flight.summary("ok", now)))

    # -- membership and time ---------------------------------------------------------------------

    def _ready(self, worker_id: str, identity: WorkerIdentity, now: float) -> None:
        known = self.fleet.workers.get(worker_id)
        if known is not None and known.identity != identity:
            self._lost(worker_id, "replaced by another life of the worker", now)
            known = None
        if known is None:
            self.fleet.add(worker_id, identity, now)
        else:
            self.fleet.mark(worker_id, interrupted=False)
        self._start_queued(now)

    def _lost(self, worker_id: str, reason: str, now: float) -> None:
        worker = self.fleet.remove(worker_id)
        if worker is None:
            return
        self._legs.lost(self._flights.values(), worker_id)
        for request_id in worker.legs.values():
            flight = self._flights[request_id]
            flight.leg = None
            error = UpstreamError(f"worker {worker_id} was lost: {reason}", code="worker_lost")
            self._again_or_fail(flight, error, worker_id, now)

    def _tick(self, now: float) -> None:
        self._out += self.fleet.index.tick(now)
        for request_id in self._timers.due(now):
            flight = self._flights.get(request_id)
            if flight is not None:
                self._check_time(flight, now)
        self._legs.forget_ghosts(now)

    def _check_time(self, flight: Flight, now: float) -> None:
        deadline = flight.request.deadline_s
        if deadline is not None and deadline <= now:
            self._fail(flight, flight.overdue(now), now)
        elif flight.queued_until is not None and flight.queued_until <= now:
            why = flight.last_error or self.fleet.missing() or "no worker serves this model"
            self._fail(flight, waited_for_nothing(self._limits.queue_timeout_s, why), now)

    def _shut_down(self, now: float) -> None:
        self._closing = True
        for flight in list(self._flights.values()):
            self._fail(flight, CapacityError("the router is stopping", code="shutting_down"), now)

    def _cancelled(self, request_id: str, outcome: str, now: float) -> None:
        flight = self._flights.get(request_id)
        if flight is not None:
            self._drop(flight, now)
            self._out.append(Gone(request_id, flight.summary(outcome, now)))

    # -- ends ------------------------------------------------------------------------------------

    def _again_or_fail(self, flight: Flight, error: KvasirError, worker_id: str, now: float) -> None:
        """The leg is over and has failed on `worker_id`."""
        self._legs.release(flight)
        self._legs.discharge(flight)
        flight.last_error = error
        spent = flight.retries >= self._limits.max_retries
        if flight.streaming or spent or isinstance(error, RequestError):
            self._fail(flight, error, now)
            return
        flight.retries += 1
        flight.avoid.add(worker_id)
        flight.forget_attempt()
        self._route_or_wait(flight, now)

    def _route_or_wait(self, flight: Flight, now: float) -> None:
        plan = self._plan(flight, now)
        if plan is None:
            self._enqueue(flight, now)
        else:
            self._start(flight, plan, now)

    def _fail(self, flight: Flight, error: KvasirError, now: float) -> None:
        self._drop(flight, now)
        request_id = flight.request.request_id
        self._out.append(Fail(request_id, error, flight.summary(error.code, now)))

    def _drop(self, flight: Flight, now: float) -> None:
        """End a request wherever it is."""
        if flight.leg is not None:
            self._legs.stop(flight, now)
        self._remove(flight)

    def _remove(self, flight: Flight) -> None:
        self._legs.release(flight)
        self._legs.discharge(flight)
        self._queue.pop(flight.request.request_id, None)
        del self._flights[flight.request.request_id]

    def validate_state(self) -> None:
        """Raises AssertionError, naming what is wrong, unless every invariant holds."""
        check_requests(self._flights, self._queue, self._timers, self.fleet)
        check_work(self._flights, self.fleet)
        check_limits(self._flights, self._limits.max_in_flight, self._limits.max_retries)
        self.fleet.index.check_integrity()
