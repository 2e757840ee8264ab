"""The core router as the edge sees it: submit tokens, get deltas, never know about workers.

The edge may live in the same process or another one; nothing here assumes which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvasir.core.errors import KvasirError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvStatus
from kvasir.core.requests import DEFAULT_SLO, Delta, EngineLoad, Request, Role, SloClass, Usage
from kvasir.core.values import value


@value
class RequestSummary:
    """What happened to a finished request: metrics, spans, `Server-Timing` and decision records are
    all made from this one value.

    Times are readings of the router's clock in seconds; None where the request never got there.
    `route_s` is what the last decision took, `tier_s` the wait for KV from tiers below the device, and
    `transfer_s` the decode worker's measured wait for KV. `retries` counts starts after a failure before
    the first token, `migrations` those after the loss of a worker. `outcome` is "ok" or a stable error code.
    `brownout` is what was done under pressure when it came, as BrownoutView.text says it. `refused`: it was
    never accepted, as if `submit` had raised; only a router in another process says so.
    """

    request_id: str
    model: str
    outcome: str
    arrival_s: float
    finished_s: float
    routed_s: float | None = None
    prefill_done_s: float | None = None
    first_token_s: float | None = None
    transfer_s: float = 0.0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    reason: str = ""
    predicted_cached_tokens: int = 0
    retries: int = 0
    migrations: int = 0
    usage: Usage = Usage()
    trace_context: str = ""
    slo: SloClass = DEFAULT_SLO
    brownout: str = ""
    route_s: float = 0.0
    tier_s: float = 0.0
    refused: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None when none came."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens; None where fewer than two came or it did not end well."""
        if self.first_token_s is None or self.outcome != "ok" or self.usage.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.usage.output_tokens - 1)

    @property
    def slo_met(self) -> bool | None:
        """Whether the client got what its class promises: an answer, its first token and its mean gap in
        time. None where the client or an output filter ended the request, which says nothing."""
        if self.outcome in ("client_closed", "slow_reader", "content_filter"):
            return None
        if self.outcome != "ok":
            return False
        ttft, itl = self.ttft_s, self.itl_s
        return (ttft is None or ttft <= self.slo.ttft_s) and (itl is None or itl <= self.slo.itl_s)


HEALTH_STATES = ("healthy", "slow_start", "probing", "ejected", "unresponsive")
"""Of a HealthView, from the best to the worst."""


@dataclass(frozen=True, slots=True)
class HealthView:
    """How a worker answers. `state`: healthy, slow_start, ejected, probing, unresponsive; `reason` says why
    it is not healthy, `for_s` how much longer that lasts if nothing happens (0: not known). `share` is the
    part of its peers' load that it may have, `ejections` how often it was ejected. `panic`: its pool is used
    as a whole, since too much of it looks bad."""

    state: str = "healthy"
    reason: str = ""
    for_s: float = 0.0
    share: float = 1.0
    ejections: int = 0
    panic: bool = False


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the router sees it. `state`: connecting, ready, interrupted, draining, refused.
    `reason` says why it is not ready, `assigned` is a part of the work that it is given in place of its
    pool's."""

    worker_id: str
    address: str
    pool: str
    state: str
    reason: str = ""
    identity: WorkerIdentity | None = None
    load: EngineLoad | None = None
    in_flight: int = 0
    kv: KvStatus | None = None
    health: HealthView = HealthView()
    assigned: Role | None = None


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """One place as one part of a decision saw it. `facts` are what was known of it (tokens, counts),
    `terms` what the policy made of that, in the table's unit."""

    worker_id: str
    rank: int
    pool: str
    kv_state: str
    facts: dict[str, float]
    terms: dict[str, float]
    total: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """The candidates of one part of a request (`prefill`, `decode` or `whole`), best first."""

    part: str
    unit: str
    places: tuple[CandidateRecord, ...]


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Why a request ran where it ran, and what came of it. Times as in RequestSummary. `attempt` counts
    decisions for this request from 1; only the last is kept. `queued_s` is from arrival to decision,
    `predicted_ttft_s` counts from the decision and `actual_ttft_s` from arrival. `actual_itl_s` is the mean
    gap between tokens. Tier tokens are the part of the cached ones that come from tiers below the device.
    Actual figures are None until they are known; `omitted` counts candidates that were left out of the parts,
    to keep records small."""

    request_id: str
    policy: str
    reason: str
    mode: str
    decided_s: float
    decided_in_s: float
    attempt: int
    prompt_tokens: int
    expected_output_tokens: int
    slo: str
    prefill_worker: str | None
    decode_worker: str
    predicted_cached_tokens: int
    predicted_ttft_s: float
    parts: tuple[PhaseRecord, ...]
    omitted: int = 0
    queued_s: float = 0.0
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    outcome: str | None = None
    actual_cached_tokens: int | None = None
    actual_ttft_s: float | None = None
    actual_itl_s: float | None = None
    predicted_tier_tokens: int = 0
    actual_tier_tokens: int | None = None
    slo_met: bool | None = None


@dataclass(frozen=True, slots=True)
class BrownoutView:
    """What is done under pressure: how many steps are in force, what they do in words, as in
    "2; cap_max_tokens=256; shed=batch" ("" for nothing), and the model that is to answer instead."""

    level: int = 0
    text: str = ""
    fallback_model: str | None = None


NO_BROWNOUT = BrownoutView()


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """How much waits for a model's workers, and what is done about it.

    `wait_s` is how long a typical request waits by the measured throughput of `tokens_per_s` (prompt and
    expected output; 0 while nothing has been measured), `pressure` the same over the promised time to first
    token. `parked` requests wait for a worker that serves them at all. `reserved_tokens` of `kv_tokens` are
    taken where requests decode.
    """

    queued: int = 0
    parked: int = 0
    wait_s: float = 0.0
    tokens_per_s: float = 0.0
    pressure: float = 0.0
    reserved_tokens: int = 0
    kv_tokens: int = 0
    brownout: BrownoutView = NO_BROWNOUT


@dataclass(frozen=True, slots=True)
class Accounting:
    """What a router serves and what it has put on workers for it. In good order every request either runs or
    waits, and work is accounted for exactly those that run. `leases` are held on prefill workers for KV that
    waits to be pulled."""

    in_flight: int
    running: int
    queued: int
    accounted: int
    leases: int

    @property
    def consistent(self) -> bool:
        """Whether they are in good order."""
        return self.running + self.queued == self.in_flight and self.accounted == self.running


class Lane(Protocol):
    """A fast path to one client for the plain deltas of one stream, past `on_delta`, for as long as it is
    `open`; see kvasir.native. What went over it is told by `tokens` (array('I') as bytes), their `characters`
    and `last_s`, when the last of them came."""

    @property
    def open(self) -> bool: ...

    @property
    def tokens(self) -> bytes: ...

    @property
    def characters(self) -> int: ...

    @property
    def last_s(self) -> float: ...

    def close(self) -> None:
        """Let nothing more go over it. Idempotent."""
        ...


class StreamSink(Protocol):
    """Receives one request's output on the router's event loop; must not block or raise.

    Any number of `on_delta`, then exactly one of `on_finish` and `on_error`.
    """

    def on_delta(self, delta: Delta) -> None: ...

    def lane(self, request_id: str) -> Lane | None:
        """A way for what comes next of this request, if it has one choice, where its client is sent each
        delta as it is; None elsewhere. Asked for after a delta, and used until it is closed, which the next
        `on_delta` does as well."""
        ...

    def on_finish(self, summary: RequestSummary) -> None: ...

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None: ...


class RequestPort(Protocol):
    """What the gateway needs of a router for requests. Obligations: every accepted request ends in exactly
    one on_finish or on_error; after `cancel` (which frees it on every worker) nothing more reaches its sink.
    """

    def submit(self, request: Request, sink: StreamSink) -> None:
        """Accept a request. Raises CapacityError when the system is full."""
        ...

    def cancel(self, request_id: str) -> None:
        """The client is gone; unknown or finished ids are ignored."""
        ...

    def brownout(self, model: str) -> BrownoutView:
        """What is done under pressure to requests for a model; nothing for one that is not known. Cheap: to
        be asked before each request."""
        ...

    def not_ready_reason(self) -> str | None:
        """None when a request could be served at once, else what is missing."""
        ...

    def not_ready_models(self) -> dict[str, str | None]:
        """For each model, by its name, None when a request of it could be served at once, else what is
        missing."""
        ...


class RouterPort(RequestPort, Protocol):
    """A router as its own process has it: requests, and what operators see and steer."""

    def workers(self) -> list[WorkerView]:
        """All known workers, by pool and id."""
        ...

    def explain(self, request_id: str) -> DecisionRecord | None:
        """The decision for a request in flight or among those that ended last; None for another."""
        ...

    def drain(self, worker_id: str, draining: bool, reason: str = "") -> None:
        """Ask a worker to take nothing new and to end what it runs, or (`draining` False) to serve again.
        Returns at once: `workers` shows when the worker has said so, to this router and to every other. One
        that is being stopped goes on draining. Raises RequestError 404 (`worker_not_found`) for a worker
        that is not known, and UpstreamError (`session_lost`) for one that cannot be told."""
        ...

    def admission(self) -> dict[str, AdmissionView]:
        """How much waits for workers, by model."""
        ...
