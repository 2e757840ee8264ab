"""One request on its way through the router, and the clockwork that the machine keeps for it."""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.requests import Delta, Leg, Request, Timings, Usage
from kvasir.ports.router import RequestSummary
from kvasir.ports.routing import Plan, Target, no_names
from kvasir.telemetry.reasons import REASONS
from kvasir_router.work import Charges


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """`ghost_ttl_s` bounds the memory of aborted legs whose worker never reports their end."""

    max_queue: int = 1024
    max_in_flight: int = 4096
    max_retries: int = 2
    queue_timeout_s: float = 60.0
    ghost_ttl_s: float = 60.0


class Phase(StrEnum):
    """Where a request is. An aggregated one is decoding from its start: nothing is handed over."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class RunningLeg:
    """The one leg of a request that runs at a time."""

    leg_id: str
    kind: Leg
    target: Target


@dataclass(frozen=True, slots=True)
class HeldLease:
    """KV on a prefill worker that waits to be pulled."""

    worker_id: str
    lease_id: str


@dataclass(slots=True)
class Flight:
    """All that the router keeps of a request. `emitted` has the token ids of each choice that the
    client was sent: what a continuation elsewhere starts from."""

    request: Request
    hashes: array[int] = field(default_factory=no_names)
    phase: Phase = Phase.QUEUED
    queued_until: float | None = None
    plan: Plan | None = None
    charges: Charges = field(default_factory=dict)
    leg: RunningLeg | None = None
    lease: HeldLease | None = None
    emitted: list[list[int]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    streaming: bool = False
    retries: int = 0
    avoid: set[str] = field(default_factory=set)
    last_error: KvasirError | None = None
    routed_s: float | None = None
    prefill_done_s: float | None = None
    first_token_s: float | None = None
    prefill_usage: Usage | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self.emitted = [[] for _ in range(self.request.sampling.n)]

    @property
    def planned(self) -> Plan:
        """The plan of a request that has one."""
        if self.plan is None:
            raise AssertionError("nothing is planned for this request")
        return self.plan

    def merged(self, usage: Usage) -> Usage:
        """The counts of the last leg, with the prefix hit of the worker that computed the prompt."""
        if self.prefill_usage is None:
            return usage
        return Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=self.prefill_usage.cached_tokens,
            transferred_tokens=usage.transferred_tokens,
            transferred_bytes=usage.transferred_bytes,
            output_tokens=usage.output_tokens,
        )

    def forget_attempt(self) -> None:
        """Back to the state before routing, for a start elsewhere."""
        self.phase = Phase.QUEUED
        self.plan = None
        self.routed_s = self.prefill_done_s = None
        self.prefill_usage = None
        self.usage = Usage()
        self.timings = Timings()

    def continues(self, delta: Delta) -> bool:
        """Whether `delta` is just the next piece of a stream that the client is reading."""
        return (
            self.streaming
            and delta.finish is None
            and not delta.last
            and not self.finished
            and 0 <= delta.index < len(self.emitted)
            and delta.offset == len(self.emitted[delta.index])
        )

    def fault(self, delta: Delta) -> str | None:
        """How `delta` breaks the stream's order, or None: nothing may be lost, repeated or invented."""
        if not 0 <= delta.index < len(self.emitted):
            return f"choice {delta.index} was not asked for"
        if delta.index in self.finished:
            return f"choice {delta.index} goes on after its end"
        expected = len(self.emitted[delta.index])
        if delta.offset != expected:
            return f"choice {delta.index} is at token {expected}, and token {delta.offset} came"
        if delta.last:
            open_choices = len(self.emitted) - len(self.finished) - (delta.finish is not None)
            if open_choices:
                return f"the request ended with {open_choices} choices open"
        return None

    def overdue(self, now: float) -> RequestError:
        """What the request ends with when its deadline has passed."""
        took = now - self.request.arrival_s
        message = f"the request was not done after {took:.1f} s ({self.phase})"
        return RequestError(message, status=504, code="request_timeout")

    def summary(self, outcome: str, now: float) -> RequestSummary:
        """What happened, as of now."""
        plan, request = self.plan, self.request
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
            usage=self.usage,
            trace_context=request.trace_context,
            slo=request.slo,
        )


def error_of(delta: Delta) -> KvasirError:
    """A failed leg as an error: what the client has to mend is a RequestError, and no reason to retry."""
    code = delta.error or "worker_failed"
    message = delta.error_message or f"the worker ended the request ({delta.finish or 'without KV'})"
    reason = REASONS.get(code)
    if reason is not None and 400 <= reason.status < 500:
        return RequestError(message, status=reason.status, code=code)
    return UpstreamError(message, code=code)


def waited_for_nothing(queue_timeout_s: float, why: object) -> CapacityError:
    """No worker took a request in time."""
    message = f"no worker could take the request within {queue_timeout_s:g} s: {why}"
    return CapacityError(message, code="no_workers", retry_after_s=5.0)


def broken_stream(worker_id: str, fault: str) -> UpstreamError:
    """A worker that lost, repeated or invented tokens."""
    return UpstreamError(f"worker {worker_id} broke the stream: {fault}", code="protocol_error")


class Timers:
    """When to look at which request again. Entries of requests that ended are skipped when they come
    up, and swept when they are the most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, when: float, request_id: str) -> None:
        """Look at the request at `when`."""
        heapq.heappush(self._heap, (when, request_id))

    def next(self) -> float | None:
        """The earliest, which may turn out to be void."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[str]:
        """Take all that have come up."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def sweep(self, live: dict[str, Flight]) -> None:
        """Drop the entries of ended requests when they outnumber the rest."""
        if len(self._heap) > 64 + 4 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def covers(self, request_id: str, by: float) -> bool:
        """Whether the request will be looked at no later than `by`; for checks."""
        return any(when <= by and name == request_id for when, name in self._heap)
