"""How requests end: their last delta or error, their summary, and what they give back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta
from kvasir.core.values import changed
from kvasir.ports.router import RequestSummary
from kvasir_router.requests.continuation import ChoiceOutput
from kvasir_router.requests.events import ClientGone, EmitDelta, FailRequest, FinishRequest
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.state import RequestState
from kvasir_router.requests.table import RequestTable, State, Table


class CompletionBase(ABC, Generic[State]):
    """Takes requests out of the table and reports the end of each."""

    def __init__(self, table: Table[State, Any]) -> None:
        self._table = table
        self._out = table.out

    def fail(self, state: State, error: KvasirError, now: float) -> None:
        """End the request with an error, queued or running."""
        summary = self._drop(state, error.code, now)
        self._out.append(FailRequest(summary.request_id, error, summary))

    def cancel(self, state: State, outcome: str, now: float) -> None:
        """End the request because its client left."""
        summary = self._drop(state, outcome, now)
        self._out.append(ClientGone(summary.request_id, summary))

    def _drop(self, state: State, outcome: str, now: float) -> RequestSummary:
        summary = state.summary(outcome, now)
        self._stop(state, now)
        self._table.remove(state)
        return summary

    def _forward(self, state: State, delta: Delta) -> None:
        """Send a delta to the client, under the client's request id."""
        request_id = state.request.request_id
        if delta.request_id != request_id:
            delta = changed(delta, request_id=request_id)
        self._out.append(EmitDelta(request_id, delta))

    def _succeed(self, state: State, now: float) -> None:
        """End the request well, after its last delta."""
        self._table.remove(state)
        self._out.append(FinishRequest(state.request.request_id, state.summary("ok", now)))

    @abstractmethod
    def _stop(self, state: State, now: float) -> None:
        """Abort what runs of the request, and give back what it holds on workers."""


class Completion(CompletionBase[RequestState]):
    """Ends requests that generate, and gives back what they hold on workers."""

    def __init__(self, table: RequestTable, legs: LegControl) -> None:
        super().__init__(table)
        self._fleet = table.fleet
        self._legs = legs

    def emit(self, state: RequestState, output: ChoiceOutput, delta: Delta) -> None:
        """Send the next output of a choice; `output` is what the client has of it."""
        output.add(delta)
        self._forward(state, delta)

    def finish(self, state: RequestState, delta: Delta, now: float) -> None:
        """End the request well, with its last delta."""
        target = self._legs.ended(state).target
        state.finish = delta.finish or ""
        if delta.usage is not None:
            usage = state.merged(delta.usage)
            if state.prefilled:
                self._fleet.reconcile(state.current, state.planned, usage, now)
            state.usage = state.total(usage, len(delta.token_ids))
        if delta.timings is not None:
            state.timings = delta.timings
            if delta.usage is not None:
                timings = state.beyond_prefill(delta.timings)
                self._fleet.measured(target, delta.usage, timings, state.charges, state.planned.prefill)
        if state.usage is not delta.usage or delta.handoff is not None:
            delta = changed(delta, usage=state.usage, handoff=None)
        self.emit(state, state.outputs[delta.index], delta)
        self._give_back(state)
        self._succeed(state, now)

    def _stop(self, state: RequestState, now: float) -> None:
        self._legs.stop(state, now)
        self._give_back(state)

    def _give_back(self, state: RequestState) -> None:
        self._legs.release(state)
        self._legs.discharge(state)
