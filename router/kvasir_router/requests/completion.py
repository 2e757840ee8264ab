"""How requests end, and which of those whose leg failed may run again instead."""

from __future__ import annotations

from dataclasses import replace

from kvasir.core.errors import KvasirError, RequestError, UpstreamError
from kvasir.core.requests import Delta
from kvasir_router.admission import Admission
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.requests.continuation import ChoiceOutput, ContinuationMode, way_on
from kvasir_router.requests.events import ClientGone, Effect, EmitDelta, FailRequest, FinishRequest
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.restarts import FREE, RetryAccounting
from kvasir_router.requests.state import MachineLimits, RequestState

TRANSFER_FAILED = "transfer_failed"
BLAMELESS = FREE | {TRANSFER_FAILED}
"""Failures that say nothing of the worker on which they show: KV that did not come lay on another one."""


class Completion:
    """Takes requests out of `flights` and the queue, giving back what they hold. `restarts` counts those that
    run again."""

    def __init__(
        self,
        fleet: Fleet,
        legs: LegControl,
        limits: MachineLimits,
        *,
        out: list[Effect],
        flights: dict[str, RequestState],
        admission: Admission,
    ) -> None:
        self._fleet = fleet
        self._legs = legs
        self._out = out
        self._flights = flights
        self._admission = admission
        self.restarts = RetryAccounting(
            max_retries=limits.max_retries,
            max_migrations=limits.max_migrations,
            budget_ratio=limits.retry_budget,
        )

    def blame(self, worker_id: str, error: KvasirError, now: float) -> None:
        """A leg failed on the worker; what only the client can mend is no worker's fault."""
        if not isinstance(error, RequestError) and error.code not in BLAMELESS:
            self._fleet.failed(worker_id, error.code, now)

    def refusal(self, flight: RequestState, error: KvasirError, *, lost: bool) -> KvasirError | None:
        """What a request whose leg ended with `error` has to end with; None: it may run again, and that is
        counted. The loss of a worker is counted for itself: it is bounded by the workers that can be lost."""
        if isinstance(error, RequestError):
            return error
        if flight.begun and way_on(flight.request.sampling) is ContinuationMode.NEITHER:
            return UpstreamError(
                f"{error.message}; a stream that is sampled without a seed and with penalties, forbidden "
                "words, a bound on reasoning or several choices cannot go on exactly elsewhere: send the "
                "request again",
                code=error.code,
            )
        return None if self.restarts.counted(flight, error, moved=lost or flight.begun) else error

    def emit(self, flight: RequestState, output: ChoiceOutput, delta: Delta) -> None:
        """Pass on what the client does not have of a choice; `output` is what it has."""
        request_id = flight.request.request_id
        output.add(delta)
        if delta.request_id != request_id:
            delta = replace(delta, request_id=request_id)
        self._out.append(EmitDelta(request_id, delta))

    def finish(self, flight: RequestState, delta: Delta, now: float) -> None:
        """The request ended well, with its last delta."""
        target = self._legs.ended(flight).target
        if delta.usage is not None:
            usage = flight.merged(delta.usage)
            if flight.prefilled:
                self._fleet.reconcile(flight.current, flight.planned, usage, now)
            flight.usage = flight.total(usage, len(delta.token_ids))
        if delta.timings is not None:
            flight.timings = delta.timings
            if delta.usage is not None:
                timings = flight.beyond_prefill(delta.timings)
                self._fleet.measured(target, delta.usage, timings, flight.charges)
        if flight.usage is not delta.usage or delta.handoff is not None:
            delta = replace(delta, usage=flight.usage, handoff=None)
        self.emit(flight, flight.outputs[delta.index], delta)
        self._remove(flight)
        self._out.append(FinishRequest(flight.request.request_id, flight.summary("ok", now)))

    def fail(self, flight: RequestState, error: KvasirError, now: float) -> None:
        """The request ends badly, wherever it is."""
        self._drop(flight, now)
        request_id = flight.request.request_id
        self._out.append(FailRequest(request_id, error, flight.summary(error.code, now)))

    def cancel(self, flight: RequestState, outcome: str, now: float) -> None:
        """The request ends because nobody wants it any more."""
        self._drop(flight, now)
        self._out.append(ClientGone(flight.request.request_id, flight.summary(outcome, now)))

    def _drop(self, flight: RequestState, now: float) -> None:
        self._legs.stop(flight, now)
        self._remove(flight)

    def _remove(self, flight: RequestState) -> None:
        self._legs.release(flight)
        self._legs.discharge(flight)
        self._admission.ended(flight.ticket)
        del self._flights[flight.request.request_id]
