"""Handles the steps that workers report for running legs: the hot path of the machine.

Nearly every delta is the next piece of a stream that the client reads; it is passed on after one check.
Anything else ends a leg, begins one, or is a fault of the worker.
"""

from __future__ import annotations

from kvasir.core.requests import Delta, StepBatch
from kvasir_router.fleet.fleet import Worker
from kvasir_router.requests.completion import Completion
from kvasir_router.requests.failover import Failover
from kvasir_router.requests.legs import FAILED, LegControl, is_leg, running
from kvasir_router.requests.placement import Placement
from kvasir_router.requests.state import RequestState, broken_stream, error_of, not_repeated, says_something
from kvasir_router.requests.table import RequestTable


class Progress:
    """Applies workers' steps to the table's requests."""

    def __init__(
        self,
        table: RequestTable,
        legs: LegControl,
        completion: Completion,
        placement: Placement,
        failover: Failover,
    ) -> None:
        self._fleet = table.fleet
        self._states = table.states
        self._admission = table.admission
        self._legs = legs
        self._completion = completion
        self._placement = placement
        self._failover = failover

    def take(self, worker_id: str, batch: StepBatch, now: float) -> None:
        """Handle a step of this worker, if the worker is known."""
        worker = self._fleet.workers.get(worker_id)
        if worker is None:
            return
        if batch.kv is not None:
            # Before the deltas, which may end what was only predicted.
            self._fleet.index.apply(worker_id, batch.kv, now)
        for delta in batch.deltas:
            request_id = worker.legs.get(delta.request_id)
            if request_id is None:
                self._legs.unowned(worker, delta)
                continue
            state = self._states[request_id]
            output = state.continued(delta)
            if output is not None:
                # Nearly every delta: the checks below, combined.
                self._completion.emit(state, output, delta)
            elif is_leg(state.prefilling, worker_id, delta):
                self._prefill_delta(state, worker, delta, now)
            else:
                self._decode_delta(state, worker, delta, now)
        if batch.load is not None:
            self._fleet.report(worker_id, batch.load)

    def _prefill_delta(self, state: RequestState, worker: Worker, delta: Delta, now: float) -> None:
        if delta.handoff is not None:
            self._legs.hold(state, worker.worker_id, delta.handoff, now)
        beside = state.ahead is not None
        if not delta.last:
            if delta.handoff is not None and not beside:
                self._placement.hand_over(state, now)
            return
        if beside:
            self._legs.ended_ahead(state)
        else:
            self._legs.ended(state)
        self._admission.computed(state.ticket)
        if delta.finish in FAILED or delta.handoff is None:
            self._failover.again_or_fail(state, error_of(delta), worker.worker_id, now)
            return
        source = state.planned.prefill_target
        state.prefill_done_s = now if state.prefill_done_s is None else state.prefill_done_s
        state.prefill_usage = delta.usage
        if delta.usage is not None and delta.timings is not None:
            state.prefill_timings = delta.timings
            self._fleet.measured(source, delta.usage, delta.timings, state.charges)
        if beside:
            state.overlap_s = now - state.decode_s
            self._legs.prefilled(state, source, now, leaves=True)
        elif not self._placement.hand_over(state, now):
            self._failover.start_again(state, now)

    def _decode_delta(self, state: RequestState, worker: Worker, delta: Delta, now: float) -> None:
        if delta.finish in FAILED:
            self._stop(state, ended=delta.last, now=now)
            self._failover.on_or_fail(state, error_of(delta), worker.worker_id, now)
            return
        self._legs.stop_ahead(state, now)
        self._legs.release(state)
        fault = state.fault(delta)
        if fault is not None:
            self._stop(state, ended=delta.last, now=now)
            self._completion.fail(state, broken_stream(worker.worker_id, fault), now)
            return
        if not state.streaming and says_something(delta):
            self._first_token(state, now)
            if not delta.last:
                delta = state.counted_first(delta)
        if state.replay is not None:
            fault = state.replay.fault(delta)
            if fault is not None:
                self._stop(state, ended=delta.last, now=now)
                self._completion.fail(state, not_repeated(state.last_error, fault), now)
                return
            delta = state.replay.rest(delta)
        if delta.last:
            self._completion.finish(state, delta, now)
        elif says_something(delta):
            self._completion.emit(state, state.outputs[delta.index], delta)

    def _first_token(self, state: RequestState, now: float) -> None:
        """Record that the running leg has sent something."""
        state.streaming = True
        state.losses = 0
        state.hedge_at = None
        state.first_token_s = now if state.first_token_s is None else state.first_token_s
        # A restarted request does not say how long others wait for their first token.
        self._admission.first_token(state.ticket, None if state.attempts else now - state.started_s)
        target, plan = running(state).target, state.planned
        self._legs.prefilled(state, target, now, leaves=False)
        slowness = state.slowness(now)
        prompt = (plan.prefill_target.worker_id,) if state.prefilled else ()
        for worker_id in dict.fromkeys((*prompt, target.worker_id)):
            self._fleet.health.succeeded(worker_id, now, slowness)

    def _stop(self, state: RequestState, *, ended: bool, now: float) -> None:
        if ended:
            self._legs.ended(state)
        else:
            self._legs.stop_decode(state, now)
