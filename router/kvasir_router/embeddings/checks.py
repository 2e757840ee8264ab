"""Invariants of the embedding machine, which tests check after every event."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvasir.core.invariants import require
from kvasir_router.embeddings.admission import EmbeddingAdmission
from kvasir_router.embeddings.fleet import EmbeddingFleet
from kvasir_router.embeddings.state import EmbeddingRequestState
from kvasir_router.requests.checks import check_waiting
from kvasir_router.requests.timers import Timers


def check_inputs(
    states: Mapping[str, EmbeddingRequestState],
    admission: EmbeddingAdmission,
    moving: Collection[str],
    timers: Timers,
) -> None:
    """Every input is in exactly one place, and its time is watched. `moving` are those that wait for another
    worker."""
    check_waiting(states, admission, timers)
    for request_id, state in states.items():
        ticket = state.ticket
        require(state.waits == (state.worker_id is None), "a request that neither runs nor waits")
        require(ticket.waiting == (state.waits and not ticket.holds), "the queue and the ticket disagree")
        require((request_id in moving) == (state.waits and ticket.holds), "moves without having begun")
    require(set(moving) <= set(states), "an ended request waits")


def check_work(states: Mapping[str, EmbeddingRequestState], fleet: EmbeddingFleet) -> None:
    """The accounted work of each worker is what runs there."""
    for state in states.values():
        if state.worker_id is not None:
            legs = fleet.workers[state.worker_id].legs
            require(legs.get(state.leg_id) == state.request.request_id, "a leg that its worker does not have")
    for worker_id, worker in fleet.workers.items():
        tokens = sum(states[request_id].tokens for request_id in worker.legs.values())
        require(fleet.tokens[worker_id] == tokens, f"{worker_id}: accounted tokens differ from those running")
