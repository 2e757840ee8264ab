"""The invariants of the request machine, as checks that tests run after every event."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.ports.routing import Target
from kvasir_router.fleet import Fleet
from kvasir_router.invariants import require
from kvasir_router.machine_state import Flight, MachineLimits, Phase, Timers
from kvasir_router.work import Work


def check_requests(
    flights: Mapping[str, Flight], queue: Mapping[str, None], timers: Timers, fleet: Fleet
) -> None:
    """Every request is in exactly one place, every leg and lease has a live request, and time is watched."""
    for request_id, flight in flights.items():
        waits = flight.phase is Phase.QUEUED
        require(waits == (request_id in queue), "queued, but not in the queue, or the reverse")
        require(waits == (flight.leg is None), "a request that neither runs nor waits")
        require(waits == (flight.plan is None), "a plan without a leg, or the reverse")
        if waits:
            until = flight.queued_until
            require(until is not None and timers.covers(request_id, until), "waits without an end")
            require(not flight.charges, "waits, and is accounted as work")
        deadline = flight.request.deadline_s
        require(deadline is None or timers.covers(request_id, deadline), "a deadline nobody watches")
        if flight.leg is not None:
            worker = fleet.workers[flight.leg.target.worker_id]
            require(worker.legs.get(flight.leg.leg_id) == request_id, "a leg its worker does not know")
        if flight.lease is not None:
            require(flight.phase is Phase.DECODING and not flight.streaming, "a lease held too long")
            require(flight.lease.worker_id in fleet.workers, "a lease on a worker that is gone")
    require(set(queue) <= set(flights), "an ended request waits")
    running = sum(flight.leg is not None for flight in flights.values())
    require(running == sum(len(w.legs) for w in fleet.workers.values()), "a leg without a request")
    require(
        all(not worker.legs.keys() & worker.ghosts.keys() for worker in fleet.workers.values()),
        "a leg that is aborted and runs",
    )


def check_work(flights: Mapping[str, Flight], fleet: Fleet) -> None:
    """Accounted work is that of the requests in flight, on workers that exist, and never negative."""
    totals: dict[Target, Work] = {}
    for flight in flights.values():
        for target, work in flight.charges.items():
            require(
                min(work.prefill_tokens, work.waiting, work.streams, work.kv_tokens) >= 0, "negative work"
            )
            totals.setdefault(target, Work()).add(work)
    accounted = fleet.accounted()
    require(totals == accounted, f"accounted {accounted}, in flight {totals}")
    require(all(target.worker_id in fleet.workers for target in accounted), "work on a lost worker")
    require(fleet.foreseen <= len(flights), "predictions of requests that have ended")


def check_limits(flights: Mapping[str, Flight], limits: MachineLimits) -> None:
    """There are no more requests, and none of them began again more often, than is allowed."""
    require(len(flights) <= limits.max_in_flight, "too many requests in flight")
    for flight in flights.values():
        require(flight.retries <= limits.max_retries, "too many retries")
        require(flight.migrations <= limits.max_migrations, "too many migrations")
        starts = flight.retries + flight.migrations + flight.hedged
        require(flight.attempts >= starts, "a start that was not counted")
