"""Moves requests to other workers after a failed leg, a lost or unresponsive worker, or a late first token.

A DECODE leg that ends before its first token restarts with the same KV where that is still useful: while the
PREFILL leg computes it, no worker can have pulled all of it; and a failed pull gets one more try, since the
fault may have been the puller's. Everything else restarts from the output that the client has.
"""

from __future__ import annotations

from dataclasses import replace

from kvasir.core.errors import KvasirError, UpstreamError
from kvasir.core.requests import Leg
from kvasir_router.fleet.work import Worker
from kvasir_router.requests.completion import Completion
from kvasir_router.requests.continuation import ContinuationMode, way_on
from kvasir_router.requests.legs import LegControl
from kvasir_router.requests.membership import Membership
from kvasir_router.requests.placement import Placement
from kvasir_router.requests.restarts import TRANSFER_FAILED
from kvasir_router.requests.state import Phase, RequestState
from kvasir_router.requests.table import RequestTable


class Failover(Membership):
    """Moves requests to other workers."""

    def __init__(
        self, table: RequestTable, legs: LegControl, completion: Completion, placement: Placement
    ) -> None:
        super().__init__(table.fleet, table.limits)
        self._table = table
        self._fleet = table.fleet
        self._states = table.states
        self._legs = legs
        self._completion = completion
        self._placement = placement

    def start_again(self, state: RequestState, now: float) -> None:
        """Release all that the request holds, and restart from the output that the client has."""
        self._legs.stop(state, now)
        self._legs.release(state)
        self._legs.discharge(state)
        state.forget_attempt(now)
        self._placement.route(state, now)

    def again_or_fail(self, state: RequestState, error: KvasirError, worker_id: str, now: float) -> None:
        """A PREFILL leg failed on `worker_id`: restart from the beginning, or fail."""
        if self._may_run_again(state, error, worker_id, now, lost=False):
            self.start_again(state, now)

    def on_or_fail(
        self, state: RequestState, error: KvasirError, worker_id: str, now: float, *, lost: bool = False
    ) -> None:
        """A leg failed on `worker_id`, or was lost with it or its engine: go on with the KV under the
        request's lease if it may still be useful, restart, or fail."""
        lease = state.lease
        pull_failed = error.code == TRANSFER_FAILED
        if not self._may_run_again(state, error, worker_id, now, lost=lost):
            return
        if lease is None or not (state.ahead or pull_failed):
            self.start_again(state, now)
        elif pull_failed and lease.failed:
            # Two workers failed to pull it, so the worker that offers it is at fault.
            state.avoid.add(lease.worker_id)
            self.start_again(state, now)
        else:
            state.lease = replace(lease, failed=pull_failed or lease.failed)
            self._decode_again(state, now, offered=now < lease.until_s)

    def hedge(self, state: RequestState, now: float) -> None:
        """No token came in many times the predicted time: take the request back and start it on workers that
        it has not used, once, if there are any and the retry budget allows it."""
        state.hedge_at = None
        leg = state.ahead or state.leg
        if leg is None or state.streaming or leg.kind is Leg.DECODE:
            return
        state.avoid.add(leg.target.worker_id)
        plan = self._placement.predict(state, now)
        if plan is None or {plan.decode.worker_id, plan.prefill_target.worker_id} & state.avoid:
            return
        if not self._table.retries.budget.withdraw():
            return
        state.hedged = True
        slowness = state.slowness(now)
        if slowness is not None:
            # No answer must not count as a fast one.
            self._fleet.health.late(leg.target.worker_id, now, slowness)
        self.start_again(state, now)

    def _decode_again(self, state: RequestState, now: float, *, offered: bool) -> None:
        """Start another DECODE leg with the same KV, if it is still `offered`."""
        state.attempts += 1
        self._legs.settle(state, state.planned.decode)
        computing = state.ahead is not None
        if computing:
            # KV that cannot be handed off at once is handed off when the prompt is computed.
            state.leg, state.ahead, state.phase = state.ahead, None, Phase.PREFILLING
        if not (offered and self._placement.hand_over(state, now)) and not computing:
            self.start_again(state, now)

    def _may_run_again(
        self, state: RequestState, error: KvasirError, worker_id: str, now: float, *, lost: bool
    ) -> bool:
        """Whether the request may run again without `worker_id`; fail it if not. A stream that the client has
        begun to read must be repeatable."""
        final = None
        if state.begun and way_on(state.request.sampling) is ContinuationMode.NEITHER:
            final = UpstreamError(
                f"{error.message}; a stream that is sampled without a seed and with penalties, forbidden "
                "words, a bound on reasoning or several choices cannot be continued exactly on another "
                "worker; send the request again",
                code=error.code,
            )
        refusal = self._table.retries.refusal(
            state, error, worker_id, now, lost=lost, begun=state.begun, final=final
        )
        if refusal is not None:
            self._completion.fail(state, refusal, now)
        return refusal is None

    def _forget(self, worker: Worker) -> None:
        self._legs.lost(self._states.values(), worker.worker_id)

    def _take_back(self, request_id: str, worker_id: str, now: float) -> bool:
        state = self._states[request_id]
        if self._placement.predict(state, now) is None:
            return False
        if state.ahead is None or state.ahead.target.worker_id == worker_id:
            self._legs.stop(state, now)
        else:
            self._legs.stop_decode(state, now)
        return True

    def _move(self, request_id: str, error: KvasirError, worker_id: str, now: float) -> None:
        state = self._states[request_id]
        state.losses += 1
        self.on_or_fail(state, error, worker_id, now, lost=True)

    def _waits_longest(self, request_id: str) -> bool:
        return self._states[request_id].losses > 0

    def _hurry(self, now: float) -> None:
        if self._fleet.open_gap(now, hurried=True):
            self._placement.unpark(now)
