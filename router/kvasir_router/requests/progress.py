"""What workers say of the legs that run there: the middle of every request's way, and the hot path.

Nearly every delta is the next piece of a stream that the client is reading; it is passed on after one look.
Whatever else comes ends a leg, begins one, or is a fault of the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvasir.core.requests import Delta, StepBatch
from kvasir_router.admission import Admission
from kvasir_router.fleet.fleet import Fleet, Worker
from kvasir_router.requests.completion import Completion
from kvasir_router.requests.failover import Failover
from kvasir_router.requests.legs import FAILED, LegControl, is_leg, running
from kvasir_router.requests.state import RequestState, broken_stream, error_of, not_repeated, says_something


class Progress:
    """Takes in what came of `flights`. `hand_over` starts the DECODE leg of one that has KV, if there is a
    place for it."""

    def __init__(
        self,
        fleet: Fleet,
        legs: LegControl,
        ends: Completion,
        elsewhere: Failover,
        *,
        flights: Mapping[str, RequestState],
        admission: Admission,
        hand_over: Callable[[RequestState, float], bool],
    ) -> None:
        self._fleet = fleet
        self._legs = legs
        self._ends = ends
        self._elsewhere = elsewhere
        self._flights = flights
        self._admission = admission
        self._hand_over = hand_over

    def take(self, worker_id: str, batch: StepBatch, now: float) -> None:
        """What happened in a step of this worker, if it is known."""
        worker = self._fleet.workers.get(worker_id)
        if worker is None:
            return
        if batch.kv is not None:
            # Before the deltas, which may end what was only foreseen.
            self._fleet.index.apply(worker_id, batch.kv, now)
        for delta in batch.deltas:
            request_id = worker.legs.get(delta.request_id)
            if request_id is None:
                self._legs.unowned(worker, delta)
                continue
            flight = self._flights[request_id]
            output = flight.continued(delta)
            if output is not None:
                # Nearly every delta: the checks below, in one look.
                self._ends.emit(flight, output, delta)
            elif is_leg(flight.prefilling, worker_id, delta):
                self._prefill_delta(flight, worker, delta, now)
            else:
                self._decode_delta(flight, worker, delta, now)
        if batch.load is not None:
            self._fleet.report(worker_id, batch.load)

    def _prefill_delta(self, flight: RequestState, worker: Worker, delta: Delta, now: float) -> None:
        if delta.handoff is not None:
            self._legs.hold(flight, worker.worker_id, delta.handoff, now)
        beside = flight.ahead is not None
        if not delta.last:
            if delta.handoff is not None and not beside:
                self._hand_over(flight, now)
            return
        if beside:
            self._legs.ended_ahead(flight)
        else:
            self._legs.ended(flight)
        self._admission.computed(flight.ticket)
        if delta.finish in FAILED or delta.handoff is None:
            self._elsewhere.again_or_fail(flight, error_of(delta), worker.worker_id, now)
            return
        source = flight.planned.prefill_target
        flight.prefill_done_s = now if flight.prefill_done_s is None else flight.prefill_done_s
        flight.prefill_usage = delta.usage
        if delta.usage is not None and delta.timings is not None:
            flight.prefill_tier_s = delta.timings.tier_s
            self._fleet.measured(source, delta.usage, delta.timings, flight.charges)
        if beside:
            flight.overlap_s = now - flight.decode_s
            self._legs.prefilled(flight, source, now, leaves=True)
        elif not self._hand_over(flight, now):
            self._elsewhere.start_again(flight, now)

    def _decode_delta(self, flight: RequestState, worker: Worker, delta: Delta, now: float) -> None:
        if delta.finish in FAILED:
            self._stop(flight, ended=delta.last, now=now)
            self._elsewhere.on_or_fail(flight, error_of(delta), worker.worker_id, now)
            return
        self._legs.stop_ahead(flight, now)
        self._legs.release(flight)
        fault = flight.fault(delta)
        if fault is not None:
            self._stop(flight, ended=delta.last, now=now)
            self._ends.fail(flight, broken_stream(worker.worker_id, fault), now)
            return
        if not flight.streaming and says_something(delta):
            self._first_token(flight, now)
            if not delta.last:
                delta = flight.counted_first(delta)
        if flight.replay is not None:
            fault = flight.replay.fault(delta)
            if fault is not None:
                self._stop(flight, ended=delta.last, now=now)
                self._ends.fail(flight, not_repeated(flight.last_error, fault), now)
                return
            delta = flight.replay.rest(delta)
        if delta.last:
            self._ends.finish(flight, delta, now)
        elif says_something(delta):
            self._ends.emit(flight, flight.outputs[delta.index], delta)

    def _first_token(self, flight: RequestState, now: float) -> None:
        """The running leg has said something."""
        flight.streaming = True
        flight.hedge_at = None
        flight.first_token_s = now if flight.first_token_s is None else flight.first_token_s
        # What began anew elsewhere does not say how long others wait for their first token.
        self._admission.first_token(flight.ticket, None if flight.attempts else now - flight.started_s)
        target, plan = running(flight).target, flight.planned
        self._legs.prefilled(flight, target, now, leaves=False)
        slowness = flight.slowness(now)
        prompt = (plan.prefill_target.worker_id,) if flight.prefilled else ()
        for worker_id in dict.fromkeys((*prompt, target.worker_id)):
            self._fleet.succeeded(worker_id, now, slowness)

    def _stop(self, flight: RequestState, *, ended: bool, now: float) -> None:
        if ended:
            self._legs.ended(flight)
        else:
            self._legs.stop_decode(flight, now)
