"""Invariants of the request machine, which tests check after every event."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.core.invariants import require
from kvasir.core.requests import Leg
from kvasir.ports.routing import RoutingTarget
from kvasir_router.admission import Admission
from kvasir_router.admission.fair_admission import FairAdmission
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.fleet.work import TargetLoad
from kvasir_router.requests.state import MachineLimits, Phase, RequestState
from kvasir_router.requests.table import Tracked
from kvasir_router.requests.timers import Timers


def check_requests(
    states: Mapping[str, RequestState], admission: Admission, timers: Timers, fleet: Fleet
) -> None:
    """Every request is in exactly one place, every leg and lease has a live request, and time limits have
    timers."""
    check_waiting(states, admission, timers)
    for request_id, state in states.items():
        waits = state.phase is Phase.QUEUED
        require(waits == (request_id in admission), "the queue and the phase disagree")
        require(waits == (state.leg is None), "a request that neither runs nor waits")
        require(waits == (state.plan is None), "a plan without a leg, or a leg without a plan")
        if waits:
            require(state.queued_until is not None, "waits without a time limit")
            require(not state.charges, "waits, and is accounted as work")
        else:
            require(state.ticket.holds and not state.ticket.waiting, "runs, and was not admitted")
        starts = state.retries + state.migrations + state.hedged
        require(state.attempts >= starts, "a start that was not counted")
        for leg in (state.leg, state.ahead):
            if leg is not None:
                worker = fleet.workers[leg.target.worker_id]
                require(worker.legs.get(leg.leg_id) == request_id, "a leg that its worker does not have")
        check_hand_over(state, fleet)
    running = sum((state.leg is not None) + (state.ahead is not None) for state in states.values())
    require(running == sum(len(w.legs) for w in fleet.workers.values()), "a leg without a request")
    require(
        all(not worker.legs.keys() & worker.ghosts.keys() for worker in fleet.workers.values()),
        "a leg that runs and is aborted",
    )


def check_hand_over(state: RequestState, fleet: Fleet) -> None:
    """A lease is held until its KV is used. A prompt that is pulled while it is computed is computed and
    accounted at the lease's worker."""
    lease, leg, ahead = state.lease, state.leg, state.ahead
    if lease is not None:
        require(state.phase is not Phase.QUEUED and not state.streaming, "a lease held too long")
        require(lease.worker_id in fleet.workers, "a lease on a worker that is gone")
        require(lease.worker_id == state.planned.prefill_target.worker_id, "a lease of another attempt")
    if leg is not None:
        require((leg.kind is Leg.PREFILL) == (state.phase is Phase.PREFILLING), "a leg of another phase")
        require(leg.target in state.charges, "a leg that is not accounted")
        computed = state.planned.prefill
        if computed is not None and computed in state.charges:
            require(state.prefilling is not None, "a prompt accounted where it is not computed")
    if ahead is not None:
        require(state.phase is Phase.DECODING and not state.streaming, "a prompt computed for no DECODE leg")
        require(leg is not None and leg.kind is Leg.DECODE, "a prompt is computed without a pull")
        require(lease is not None and lease.worker_id == ahead.target.worker_id, "pulled without a lease")
        require(ahead.kind is Leg.PREFILL and ahead.target in state.charges, "a prompt not accounted")


def check_work(states: Mapping[str, RequestState], fleet: Fleet) -> None:
    """Accounted work is that of the requests in flight, on existing workers, and never negative."""
    totals: dict[RoutingTarget, TargetLoad] = {}
    for state in states.values():
        for target, work in state.charges.items():
            require(
                min(work.prefill_tokens, work.waiting, work.streams, work.kv_tokens) >= 0, "negative work"
            )
            totals.setdefault(target, TargetLoad()).add(work)
    accounted = fleet.accounted()
    require(totals == accounted, f"accounted {accounted}, in flight {totals}")
    require(all(target.worker_id in fleet.workers for target in accounted), "work on a lost worker")
    require(fleet.predicted <= len(states), "predictions of requests that have ended")


def check_waiting(states: Mapping[str, Tracked], admission: FairAdmission, timers: Timers) -> None:
    """Deadlines and waits have timers, and admission holds requests of the table only."""
    for request_id, state in states.items():
        for until in (state.request.deadline_s, state.queued_until):
            require(until is None or timers.holds(until, request_id), "a time limit without a timer")
    require(set(admission) <= set(states), "an ended request waits")
    admission.check(sum(state.ticket.holds for state in states.values()))


def check_limits(states: Mapping[str, Tracked], limits: MachineLimits) -> None:
    """The numbers of requests, retries and migrations are within their limits."""
    require(len(states) <= limits.max_in_flight, "too many requests in flight")
    for state in states.values():
        require(state.retries <= limits.max_retries, "too many retries")
        require(state.migrations <= limits.max_migrations, "too many migrations")
