"""The state of one request in the router, and the errors it may end with."""

from __future__ import annotations

from array import array
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum

from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.requests import Continuation, Delta, KvHandoff, Leg, Request, SloClass, Timings, Usage
from kvasir.core.values import changed, value
from kvasir.native import StreamTokens
from kvasir.ports.router import LostAttempt, RequestSummary, RunningView
from kvasir.ports.routing import Plan, RoutingTarget, no_names
from kvasir.telemetry.reasons import REASONS
from kvasir_router.admission import AdmissionTicket
from kvasir_router.fleet.work import Charges
from kvasir_router.requests.continuation import ChoiceOutput, ContinuationMode, ReplayFilter, extended, way_on

SHORTEST_TTFT_S = 0.02
"""Predictions below this say nothing about how slow a worker is: the event loop's own resolution is of this
size."""
_NO_USAGE = Usage()
_NO_TIMINGS = Timings()


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """See kvasir.config.spec.routing; admission limits what waits. `migrate_s` is how long legs on a broken
    connection wait for it to resume, and `ghost_ttl_s` bounds the memory of aborted legs whose worker never
    reports their end. By `known_slo`, workers judge legs that name no SLO class."""

    max_in_flight: int = 4096
    max_retries: int = 2
    max_migrations: int = 3
    migrate_s: float = 0.5
    retry_budget: float = 0.15
    hedge_after: float = 8.0
    hedge_min_s: float = 1.0
    queue_timeout_s: float = 60.0
    ghost_ttl_s: float = 60.0
    known_slo: SloClass | None = None

    def named_slo(self, request: Request) -> SloClass | None:
        """Return the SLO class that legs of a request name. They name none that would change nothing: workers
        judge only what they trace."""
        slo, known = request.slo, self.known_slo
        if not request.trace_context:
            return None
        return None if known is not None and (known.ttft_s, known.itl_s) == (slo.ttft_s, slo.itl_s) else slo


class Phase(StrEnum):
    """The phase of a request. An aggregated request is DECODING from its start: nothing is handed over."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@value
class RunningLeg:
    """A running leg of a request."""

    leg_id: str
    kind: Leg
    target: RoutingTarget


@value
class HeldLease:
    """KV on a prefill worker that waits to be pulled, until `until_s` at the latest. `failed`: a pull of it
    failed."""

    worker_id: str
    handoff: KvHandoff
    until_s: float
    failed: bool = False


class RequestState:
    """The state of a request in the router.

    `request` is the client's; `current` is what runs, whose prompt may end with output that the client has
    (`continuation`). `outputs` is what the client has of each choice; `replay` drops it from a leg that
    started again. `ahead` is the PREFILL leg that still computes what a DECODE leg has begun to pull.
    `streaming`: `leg` has sent something. `attempts` counts starts after the first, whatever their reason,
    `retries` those after a failure, `migrations` those after the loss of a worker, and `losses` the workers
    lost since the last first token. `ticket` is its admission, and `brownout` the steps in force at its
    arrival. `decode_s` is when the DECODE leg was sent, and `overlap_s` how long the PREFILL leg ran after
    that.
    """

    request: Request
    ticket: AdmissionTicket
    brownout: str
    current: Request
    hashes: array[int]
    phase: Phase
    queued_until: float | None = None
    plan: Plan | None = None
    charges: Charges
    _leg: RunningLeg | None = None
    ahead: RunningLeg | None = None
    lease: HeldLease | None = None
    outputs: list[ChoiceOutput]
    continuation: Continuation | None = None
    replay: ReplayFilter | None = None
    streaming: bool = False
    attempts: int = 0
    retries: int = 0
    migrations: int = 0
    losses: int = 0
    hedge_at: float | None = None
    hedged: bool = False
    avoid: set[str]
    last_error: KvasirError | None = None
    started_s: float = 0.0
    routed_s: float | None = None
    route_s: float = 0.0
    decode_s: float = 0.0
    overlap_s: float = 0.0
    prefill_done_s: float | None = None
    first_token_s: float | None = None
    prefill_usage: Usage | None = None
    prefill_timings: Timings
    usage: Usage
    timings: Timings
    finish: str = ""
    lost: tuple[LostAttempt, ...] = ()

    def __init__(self, request: Request, ticket: AdmissionTicket, brownout: str = "") -> None:
        self.request = request
        self.ticket = ticket
        self.brownout = brownout
        self.current = request
        self.hashes = no_names()
        self.phase = Phase.QUEUED
        self.charges = {}
        self.avoid = set()
        self.usage = _NO_USAGE
        self.prefill_timings = self.timings = _NO_TIMINGS
        resumed = request.resumed
        if resumed is None:
            self.outputs = [ChoiceOutput() for _ in range(request.sampling.n)]
        else:
            self.outputs = [ChoiceOutput(resumed.tokens, resumed.characters)]
            self.current, self.continuation = extended(request, self.outputs[0])

    @property
    def leg(self) -> RunningLeg | None:
        """The leg that generates the client's tokens."""
        return self._leg

    @leg.setter
    def leg(self, leg: RunningLeg | None) -> None:
        # Deltas of an earlier leg, or of this one after its end, must not reach the client.
        for output in self.outputs:
            output.progress.fence()
        self._leg = leg

    def fast_path(self) -> tuple[str, str, StreamTokens] | None:
        """The worker and leg whose plain deltas may bypass the machine, and the tokens to add them to; None
        if the machine has to examine each delta."""
        leg, output = self._leg, self.outputs[0]
        if not self.streaming or leg is None or self.replay is not None or len(self.outputs) > 1:
            return None
        if output.finished or output.parts is not None or not output.progress.count:
            return None
        return leg.target.worker_id, leg.leg_id, output.progress

    @property
    def planned(self) -> Plan:
        """The plan of a request that has one."""
        if self.plan is None:
            raise AssertionError("nothing is planned for this request")
        return self.plan

    @property
    def prefilling(self) -> RunningLeg | None:
        """The PREFILL leg, while it runs."""
        return self.leg if self.phase is Phase.PREFILLING else self.ahead

    @property
    def prefilled(self) -> bool:
        """Whether the prompt was computed where planned, as far as its worker has reported."""
        return self.planned.prefill is None or self.prefill_usage is not None

    @property
    def begun(self) -> bool:
        """Whether the client has some of its output."""
        return any(output.progress.count for output in self.outputs)

    def slowness(self, now: float) -> float | None:
        """The time since this attempt began, relative to the predicted time to its first token; None without
        a prediction."""
        predicted = self.planned.predicted_ttft_s
        return (now - self.started_s) / max(predicted, SHORTEST_TTFT_S) if predicted else None

    def merged(self, usage: Usage) -> Usage:
        """The counts of the last leg, with the prefix hit of the worker that computed the prompt."""
        if self.prefill_usage is None:
            return usage
        known = self.prefill_usage
        return changed(usage, cached_tokens=known.cached_tokens, tier_tokens=known.tier_tokens)

    def counted_first(self, delta: Delta) -> Delta:
        """The first tokens of the running leg, with what is known of the prompt's prefix hit: a client that
        was cut off has used that, too."""
        known = delta.usage
        if known is None:
            known = Usage(prompt_tokens=len(self.current.tokens), output_tokens=len(delta.token_ids))
        self.usage = self.total(self.merged(known), len(delta.token_ids))
        if self.usage is delta.usage or not self.usage.cached_tokens:
            return delta
        return changed(delta, usage=self.usage)

    def beyond_prefill(self, timings: Timings) -> Timings:
        """The durations of the last leg, without its wait for KV that was still being computed."""
        waited = max(0.0, self.overlap_s - timings.queue_s)
        return changed(timings, transfer_s=max(0.0, timings.transfer_s - waited)) if waited else timings

    def total(self, usage: Usage, coming: int) -> Usage:
        """The counts of the whole request, where `usage` is of its last attempt and `coming` output tokens
        are still to be added."""
        if self.continuation is None:
            return usage
        prompt = len(self.request.tokens)
        return changed(
            usage,
            prompt_tokens=prompt,
            cached_tokens=min(usage.cached_tokens, prompt),
            tier_tokens=min(usage.tier_tokens, prompt),
            transferred_tokens=min(usage.transferred_tokens, prompt),
            output_tokens=coming + sum(output.progress.count for output in self.outputs),
        )

    def forget_attempt(self, now: float) -> None:
        """Return to the state before routing, to start on another worker from what the client has. What the
        attempt did in vain is kept."""
        if self.plan is not None:
            self.lost += (self._lost_attempt(self.plan, now),)
        self.phase = Phase.QUEUED
        self.plan = None
        self.streaming = False
        self.hedge_at = None
        self.prefill_usage = None
        self.prefill_timings = _NO_TIMINGS
        self.usage = _NO_USAGE
        self.timings = _NO_TIMINGS
        self.overlap_s = 0.0
        self.attempts += 1
        if not self.begun:
            self.routed_s = self.prefill_done_s = None
        elif way_on(self.request.sampling) is ContinuationMode.EXTEND:
            self.current, self.continuation = extended(self.request, self.outputs[0])
            self.hashes = no_names()
        else:
            self.replay = ReplayFilter(self.outputs)

    def _lost_attempt(self, plan: Plan, now: float) -> LostAttempt:
        repeats = self.begun and way_on(self.request.sampling) is not ContinuationMode.EXTEND
        return LostAttempt(
            None if plan.prefill is None else plan.prefill.worker_id,
            plan.decode.worker_id,
            self.started_s,
            now,
            max(0, len(self.current.tokens) - plan.predicted_cached_tokens),
            sum(output.progress.count for output in self.outputs) if repeats else 0,
        )

    def continued(self, delta: Delta) -> ChoiceOutput | None:
        """The choice that `delta` plainly continues in a running stream; None if it does not."""
        index, outputs = delta.index, self.outputs
        if not self.streaming or delta.finish is not None or delta.last or self.replay is not None:
            return None
        if not 0 <= index < len(outputs):
            return None
        output = outputs[index]
        return None if output.finished or delta.offset != output.progress.count else output

    def fault(self, delta: Delta) -> str | None:
        """How `delta` breaks the stream's order, or None: nothing may be lost, repeated or invented."""
        if not 0 <= delta.index < len(self.outputs):
            return f"choice {delta.index} was not asked for"
        output, replay = self.outputs[delta.index], self.replay
        if output.finished if replay is None else replay.ended(delta.index):
            return f"choice {delta.index} goes on after its end"
        expected = output.progress.count if replay is None else replay.at(delta.index)
        if delta.offset != expected:
            return f"choice {delta.index} is at token {expected}, and token {delta.offset} came"
        if delta.last:
            open_choices = (
                sum(not each.finished for each in self.outputs) if replay is None else replay.open_choices
            ) - (delta.finish is not None)
            if open_choices:
                return f"the request ended with {open_choices} choices open"
        return None

    def overdue(self, now: float) -> RequestError:
        """The error of a request whose deadline has passed."""
        took = now - self.request.arrival_s
        message = f"the request was not done after {took:.1f} s ({self.phase})"
        return RequestError(message, status=504, code="request_timeout")

    def summary(self, outcome: str, now: float) -> RequestSummary:
        """The summary as of now."""
        plan, request = self.plan, self.request
        first, timings = self.prefill_timings, self.timings
        apart = plan is not None and plan.prefill is not None
        return RequestSummary(
            request_id=request.request_id,
            model=request.model,
            outcome=outcome,
            arrival_s=request.arrival_s,
            finished_s=now,
            routed_s=self.routed_s,
            prefill_done_s=self.prefill_done_s,
            first_token_s=self.first_token_s,
            transfer_s=self.timings.transfer_s,
            prefill_worker=plan.prefill.worker_id if plan is not None and plan.prefill is not None else None,
            decode_worker=plan.decode.worker_id if plan is not None else None,
            reason=plan.reason if plan is not None else "",
            predicted_cached_tokens=plan.predicted_cached_tokens if plan is not None else 0,
            retries=self.retries,
            migrations=self.migrations,
            usage=self.usage,
            trace_context=request.trace_context,
            slo=request.slo,
            brownout=self.brownout,
            route_s=self.route_s,
            tier_s=first.tier_s + timings.tier_s,
            waited_s=first.queue_s + max(0.0, timings.queue_s - self.overlap_s),
            computed_s=first.prefill_s if apart else timings.prefill_s,
            pulled_s=self.beyond_prefill(timings).transfer_s,
            finish=self.finish,
            tenant=request.tenant,
            route_arm=request.route_arm,
            key=request.key,
            started_s=self.started_s,
            prompt_tokens=len(request.tokens),
            sent_tokens=sum([output.progress.count for output in self.outputs]),
            choices=request.sampling.n,
            lost=self.lost,
        )

    def view(self, now: float) -> RunningView:
        """The request as of now."""
        so_far = self.summary("", now)
        return RunningView(self.phase.value, len(self.request.tokens), so_far.sent_tokens, so_far)


def says_something(delta: Delta) -> bool:
    """Whether the delta has anything for the client, or for the count of parsed text."""
    return bool(
        delta.token_ids
        or delta.text
        or delta.finish is not None
        or delta.raw_length
        or delta.reasoning
        or delta.tool_calls
        or delta.prompt_logprobs
    )


def error_of(delta: Delta) -> KvasirError:
    """The error of a failed leg: a RequestError if the client must fix it, and no reason to retry; a
    CapacityError, which says when to retry, if the worker has no room."""
    code = delta.error or "worker_failed"
    message = delta.error_message or f"the worker ended the request ({delta.finish or 'without KV'})"
    reason = REASONS.get(code)
    if reason is not None and 400 <= reason.status < 500:
        return RequestError(message, status=reason.status, code=code)
    if reason is not None and reason.status == 503:
        return CapacityError(message, code=code)
    return UpstreamError(message, code=code)


def broken_stream(worker_id: str, fault: str) -> UpstreamError:
    """The error of a worker that lost, repeated or invented tokens."""
    return UpstreamError(f"worker {worker_id} broke the stream: {fault}", code="protocol_error")


def not_repeated(lost: KvasirError | None, fault: str) -> UpstreamError:
    """The error of a stream that was replayed after `lost` and came out differently."""
    why = "" if lost is None else f"{lost.message}; "
    return UpstreamError(f"{why}the stream could not be repeated elsewhere: {fault}", code="worker_lost")


def check_arrival(request: Request, states: Container[str], *, closing: bool) -> None:
    """Raise CapacityError if the machine is `closing`, RequestError if the request's id is in flight."""
    if closing:
        raise CapacityError("the router is stopping", code="shutting_down")
    if request.request_id in states:
        raise RequestError(
            f"request id {request.request_id} is in flight", status=500, code="duplicate_request"
        )


_USUAL_RETRY_S = 5.0


def waited_for_nothing(queue_timeout_s: float, why: object, ready_in_s: float | None) -> CapacityError:
    """The error of a request that no worker took in time; one may be available in `ready_in_s`."""
    message = f"no worker could take the request within {queue_timeout_s:g} s: {why}"
    retry_s = _USUAL_RETRY_S if ready_in_s is None else max(1.0, ready_in_s)
    return CapacityError(message, code="no_workers", retry_after_s=retry_s)


def refuse_to_wait(ready_in_s: float | None, queue_timeout_s: float, why: str | None) -> None:
    """Raise CapacityError if no worker will be available before the request's longest wait is over."""
    if ready_in_s is not None and ready_in_s > queue_timeout_s:
        message = f"{why or 'no worker serves this model'}; one is being started, in about {ready_in_s:.0f} s"
        raise CapacityError(message, code="no_workers", retry_after_s=ready_in_s)
