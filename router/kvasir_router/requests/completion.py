"""How requests end, and which of those whose leg failed may run again instead."""

from __future__ import annotations

from dataclasses import replace

from kvasir.core.errors import KvasirError, RequestError, UpstreamError
from kvasir.core.requests import Delta
from kvasir_router.requests.continuation import ChoiceOutput, ContinuationMode, way_on
from kvasir_router.requests.events import ClientGone, EmitDelta, FailRequest, FinishRequest
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.restarts import FREE
from kvasir_router.requests.state import RequestState
from kvasir_router.requests.table import RequestTable

TRANSFER_FAILED = "transfer_failed"
BLAMELESS = FREE | {TRANSFER_FAILED}
"""Failures that say nothing of the worker on which they show: KV that did not come lay on another one."""


class Completion:
    """Takes requests out of the table, giving back what they hold."""

    def __init__(self, table: RequestTable, legs: LegControl) -> None:
        self._table = table
        self._fleet = table.fleet
        self._legs = legs
        self._out = table.out

    def blame(self, worker_id: str, error: KvasirError, now: float) -> None:
        """A leg failed on the worker; what only the client can mend is no worker's fault."""
        if not isinstance(error, RequestError) and error.code not in BLAMELESS:
            self._fleet.failed(worker_id, error.code, now)

    def refusal(self, state: RequestState, error: KvasirError, *, lost: bool) -> KvasirError | None:
        """What a request whose leg ended with `error` has to end with; None: it may run again, and that is
        counted. The loss of a worker is counted for itself: it is bounded by the workers that can be lost."""
        if isinstance(error, RequestError):
            return error
        if state.begun and way_on(state.request.sampling) is ContinuationMode.NEITHER:
            return UpstreamError(
                f"{error.message}; a stream that is sampled without a seed and with penalties, forbidden "
                "words, a bound on reasoning or several choices cannot go on exactly elsewhere: send the "
                "request again",
                code=error.code,
            )
        return None if self._table.retries.counted(state, error, moved=lost or state.begun) else error

    def emit(self, state: RequestState, output: ChoiceOutput, delta: Delta) -> None:
        """Pass on what the client does not have of a choice; `output` is what it has."""
        request_id = state.request.request_id
        output.add(delta)
        if delta.request_id != request_id:
            delta = replace(delta, request_id=request_id)
        self._out.append(EmitDelta(request_id, delta))

    def finish(self, state: RequestState, delta: Delta, now: float) -> None:
        """The request ended well, with its last delta."""
        target = self._legs.ended(state).target
        if delta.usage is not None:
            usage = state.merged(delta.usage)
            if state.prefilled:
                self._fleet.reconcile(state.current, state.planned, usage, now)
            state.usage = state.total(usage, len(delta.token_ids))
        if delta.timings is not None:
            state.timings = delta.timings
            if delta.usage is not None:
                timings = state.beyond_prefill(delta.timings)
                self._fleet.measured(target, delta.usage, timings, state.charges)
        if state.usage is not delta.usage or delta.handoff is not None:
            delta = replace(delta, usage=state.usage, handoff=None)
        self.emit(state, state.outputs[delta.index], delta)
        self._remove(state)
        self._out.append(FinishRequest(state.request.request_id, state.summary("ok", now)))

    def fail(self, state: RequestState, error: KvasirError, now: float) -> None:
        """The request ends badly, wherever it is."""
        self._drop(state, now)
        request_id = state.request.request_id
        self._out.append(FailRequest(request_id, error, state.summary(error.code, now)))

    def cancel(self, state: RequestState, outcome: str, now: float) -> None:
        """The request ends because nobody wants it any more."""
        self._drop(state, now)
        self._out.append(ClientGone(state.request.request_id, state.summary(outcome, now)))

    def _drop(self, state: RequestState, now: float) -> None:
        self._legs.stop(state, now)
        self._remove(state)

    def _remove(self, state: RequestState) -> None:
        self._legs.release(state)
        self._legs.discharge(state)
        self._table.admission.ended(state.ticket)
        del self._table.states[state.request.request_id]
