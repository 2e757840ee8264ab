"""The invariants of the machine that embeds, as checks that tests run after every event."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvasir.core.invariants import require
from kvasir_router.embeddings.admission import EmbeddingAdmission
from kvasir_router.embeddings.fleet import EmbeddingFleet
from kvasir_router.embeddings.state import EmbeddingLimits, EmbeddingRequestState
from kvasir_router.requests.timers import Timers


def check_inputs(
    flights: Mapping[str, EmbeddingRequestState],
    admission: EmbeddingAdmission,
    moving: Collection[str],
    timers: Timers,
    limits: EmbeddingLimits,
) -> None:
    """Every input is in exactly one place, its time is watched, and bounds hold. `moving` are those that wait
    to go elsewhere."""
    for request_id, flight in flights.items():
        ticket = flight.ticket
        require(flight.waits == (flight.worker_id is None), "a request that neither runs nor waits")
        deadline = flight.request.deadline_s
        require(deadline is None or timers.holds(deadline, request_id), "a deadline nobody watches")
        require(ticket.waiting == (flight.waits and not ticket.holds), "the queue has it, or has it not")
        require((request_id in moving) == (flight.waits and ticket.holds), "waits anew without a beginning")
        if flight.waits:
            require(timers.holds(flight.queued_until, request_id), "waits without an end")
        require(flight.retries <= limits.max_retries, "too many retries")
        require(flight.migrations <= limits.max_migrations, "too many migrations")
    require({*admission, *moving} <= set(flights), "an ended request waits")
    admission.check(sum(flight.ticket.holds for flight in flights.values()))
    require(len(flights) <= limits.max_in_flight, "too many requests in flight")


def check_work(flights: Mapping[str, EmbeddingRequestState], fleet: EmbeddingFleet) -> None:
    """What is accounted for each worker is what runs there."""
    for flight in flights.values():
        if flight.worker_id is not None:
            legs = fleet.workers[flight.worker_id].legs
            require(legs.get(flight.leg_id) == flight.request.request_id, "a leg its worker does not know")
    for worker_id, worker in fleet.workers.items():
        tokens = sum(flights[request_id].tokens for request_id in worker.legs.values())
        require(fleet.tokens[worker_id] == tokens, f"{worker_id} is charged otherwise than it works")
