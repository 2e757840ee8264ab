"""Ends and retries of requests for embeddings. Nothing is handed over: a retry starts from the input."""

from __future__ import annotations

from bisect import insort

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Usage
from kvasir.ports.router import LostAttempt
from kvasir_router.admission import AdmissionRules
from kvasir_router.embeddings.admission import EmbeddingAdmission
from kvasir_router.embeddings.fleet import EmbeddingFleet
from kvasir_router.embeddings.state import EmbeddingRequestState
from kvasir_router.fleet.work import Worker
from kvasir_router.requests.completion import CompletionBase
from kvasir_router.requests.events import AbortOn
from kvasir_router.requests.membership import Membership
from kvasir_router.requests.state import MachineLimits
from kvasir_router.requests.table import Table


class EmbeddingTable(Table[EmbeddingRequestState, EmbeddingAdmission]):
    """The table of requests for embeddings. `moving` has those that wait for another worker after a failure,
    the most urgent first, then in order of arrival."""

    def __init__(self, fleet: EmbeddingFleet, limits: MachineLimits, rules: AdmissionRules) -> None:
        super().__init__(EmbeddingAdmission(rules), limits, fleet.health)
        self.fleet = fleet
        self.moving: list[tuple[int, int, str]] = []

    def move(self, state: EmbeddingRequestState, now: float) -> None:
        """Let a request wait for another worker."""
        insort(self.moving, self._entry(state))
        self.wait_until(state, now)

    def remove(self, state: EmbeddingRequestState) -> None:
        """Remove a request that ends."""
        if state.waits and state.ticket.holds:
            self.moving.remove(self._entry(state))
        super().remove(state)

    @staticmethod
    def _entry(state: EmbeddingRequestState) -> tuple[int, int, str]:
        return state.request.priority, state.order, state.request.request_id


class EmbeddingCompletion(CompletionBase[EmbeddingRequestState]):
    """Ends requests, and accounts for the legs that end with them."""

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__(table)
        self._fleet = table.fleet

    def finish(self, state: EmbeddingRequestState, worker_id: str, delta: Delta, now: float) -> None:
        """The request ended well on the worker, with the delta that has its vector."""
        state.worker_id, state.done_s = worker_id, now
        state.usage = delta.usage or Usage(prompt_tokens=state.tokens)
        self._table.admission.first_token(state.ticket, now - state.started_s)
        self._forward(state, delta)
        self._succeed(state, now)

    def release(self, state: EmbeddingRequestState, now: float, *, aborted: bool) -> None:
        """End the accounting of the request's leg, and abort the leg unless it has ended."""
        if state.worker_id is not None:
            self._fleet.discharge(state.worker_id, state.leg_id, state.tokens, now, aborted=aborted)
            if aborted:
                self._out.append(AbortOn(state.worker_id, (state.leg_id,)))
            state.worker_id = None

    def _stop(self, state: EmbeddingRequestState, now: float) -> None:
        self.release(state, now, aborted=True)


class EmbeddingFailover(Membership):
    """Moves requests to other workers."""

    def __init__(self, table: EmbeddingTable, completion: EmbeddingCompletion) -> None:
        super().__init__(table.fleet, table.limits)
        self._table = table
        self._states = table.states
        self._fleet = table.fleet
        self._completion = completion

    def again_or_fail(
        self,
        state: EmbeddingRequestState,
        error: KvasirError,
        worker_id: str,
        now: float,
        *,
        lost: bool = False,
    ) -> None:
        """A leg failed on `worker_id`: queue the request for another worker, or fail it."""
        state.lost += (LostAttempt(None, worker_id, state.started_s, now, state.tokens),)
        refusal = self._table.retries.refusal(state, error, worker_id, now, lost=lost)
        if refusal is not None:
            self._completion.fail(state, refusal, now)
        else:
            self._table.move(state, now)

    def _forget(self, worker: Worker) -> None:
        for request_id in worker.legs.values():
            self._states[request_id].worker_id = None

    def _take_back(self, request_id: str, worker_id: str, now: float) -> bool:
        if self._fleet.missing():
            return False
        self._completion.release(self._states[request_id], now, aborted=True)
        return True

    def _move(self, request_id: str, error: KvasirError, worker_id: str, now: float) -> None:
        self.again_or_fail(self._states[request_id], error, worker_id, now, lost=True)
