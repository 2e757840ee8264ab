"""The port between edge and core router: submit tokens, receive deltas, without knowledge of workers.

The edge can run in the same process or in another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvasir.core.adapters import HeldAdapter
from kvasir.core.errors import KvasirError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvStatus
from kvasir.core.requests import DEFAULT_SLO, Delta, EngineLoad, Request, Role, RouteArm, SloClass, Usage
from kvasir.core.values import value
from kvasir.ports.recordings import RecordingPort


@value
class LostAttempt:
    """An attempt of a request that ended before the request did, on these workers of the router. It computed
    at most `prompt_tokens` tokens of the prompt, and `repeated_tokens` of output that another attempt
    repeats."""

    prefill_worker: str | None
    decode_worker: str
    begin_s: float
    end_s: float
    prompt_tokens: int
    repeated_tokens: int = 0


@value
class RequestSummary:
    """The summary of a finished request, from which metrics, spans, `Server-Timing` and decision records are
    made.

    Times are readings of the router's clock in seconds; None for stages that the request did not reach.
    `route_s` is the duration of the last decision, `tier_s` the wait for KV from tiers, and `transfer_s` the
    decode worker's measured wait for KV, of which `pulled_s` is without the time in which the prompt was
    still being computed. By the workers' measure, the request waited `waited_s` for their engines, and its
    prompt was computed in `computed_s`. `finish` is the finish reason of the last choice, "" without one.
    `retries` counts starts after a failure before the first token, `migrations` failovers after the loss of a
    worker; `started_s` is when the last attempt began, and `lost` are those before it. The client has been
    sent `sent_tokens` in all of its `choices`, for a prompt of `prompt_tokens`, and its API key is known as
    `key`. `outcome` is "ok" or a stable error code. `brownout` is BrownoutView.text at arrival. `refused`:
    the request was not accepted, as if `submit` had raised; set only by a router in another process.
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
    waited_s: float = 0.0
    computed_s: float = 0.0
    pulled_s: float = 0.0
    finish: str = ""
    tenant: str = ""
    route_arm: RouteArm | None = None
    key: str = ""
    started_s: float = 0.0
    prompt_tokens: int = 0
    sent_tokens: int = 0
    choices: int = 1
    lost: tuple[LostAttempt, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens; None for fewer than two tokens or if the request failed."""
        if self.first_token_s is None or self.outcome != "ok" or self.usage.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.usage.output_tokens - 1)

    @property
    def slo_met(self) -> bool | None:
        """Whether the request succeeded within the TTFT and mean ITL of its SLO class. None if the client or
        an output filter ended the request."""
        if self.outcome in ("client_closed", "slow_reader", "content_filter"):
            return None
        if self.outcome != "ok":
            return False
        ttft, itl = self.ttft_s, self.itl_s
        return (ttft is None or ttft <= self.slo.ttft_s) and (itl is None or itl <= self.slo.itl_s)


HEALTH_STATES = ("healthy", "slow_start", "probing", "ejected", "unresponsive")
"""States of a HealthView, from best to worst."""


@dataclass(frozen=True, slots=True)
class HealthView:
    """The health of a worker. `state`: healthy, slow_start, ejected, probing, unresponsive; `reason` says why
    it is not healthy, `for_s` how long that lasts without further events (0: unknown). `share` is the
    fraction of its peers' load that it may receive, `ejections` the number of ejections. `panic`: the whole
    pool is used, because too many of its workers would be ejected."""

    state: str = "healthy"
    reason: str = ""
    for_s: float = 0.0
    share: float = 1.0
    ejections: int = 0
    panic: bool = False


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as seen by the router. `state`: connecting, ready, interrupted, draining, refused. `reason`
    says why it is not ready; `assigned` is a role that replaces that of its pool; `adapters` are those that
    it has loaded at run time."""

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
    adapters: tuple[HeldAdapter, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that was loaded at run time and can be served. Requests name it to the router by `key`."""

    name: str
    model: str
    key: str


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """One candidate in one part of a decision. `facts` are its known properties (tokens, counts), `terms` the
    policy's terms in the unit of the table. `link` is the class of the link from the chosen place that
    prefills, "" if the policy does not use it."""

    worker_id: str
    rank: int
    pool: str
    kv_state: str
    facts: dict[str, float]
    terms: dict[str, float]
    total: float
    chosen: bool
    link: str = ""


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """The candidates of one part of a request (`prefill`, `decode` or `whole`), best first."""

    part: str
    unit: str
    places: tuple[CandidateRecord, ...]


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The reasons of a placement, and its outcome. Times as in RequestSummary. `attempt` counts decisions for
    this request from 1; only the last is kept. `queued_s` is the time from arrival to decision;
    `predicted_ttft_s` counts from the decision, `actual_ttft_s` from arrival. `actual_itl_s` is the mean ITL.
    Tier tokens are the part of the cached tokens that comes from tiers. Actual values are None until they are
    known; `omitted` counts candidates that are left out of the parts to keep records small. `regret_s` is
    None for a decision that is not judged (see kvasir_router.decide.regret), `regret_causes` has the causes
    with a part of it; `better` are the part and worker of what would have cost less, with the TTFT from the
    decision that it would have had. `rates` says where the costs of the chosen workers began, before
    measurements."""

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
    regret_s: float | None = None
    regret_causes: dict[str, float] = field(default_factory=dict)
    better: tuple[str, ...] = ()
    better_ttft_s: float | None = None
    rates: str = ""


@dataclass(frozen=True, slots=True)
class RegretView:
    """The regret of a router's decisions for one model: how many were judged, how many had any, and the sum
    in seconds by cause. The counts only grow."""

    judged: int = 0
    regretted: int = 0
    causes: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The sum over all causes."""
        return sum(self.causes.values())


@dataclass(frozen=True, slots=True)
class RunningView:
    """A request that has not ended. `phase`: queued, prefilling, decoding. `so_far` is its summary as of the
    moment, without an outcome; `output_tokens` is what its client has been sent, over all choices."""

    phase: str
    prompt_tokens: int
    output_tokens: int
    so_far: RequestSummary


@dataclass(frozen=True, slots=True)
class BrownoutView:
    """The state of brown-out: the number of active steps, a text such as "2; cap_max_tokens=256; shed=batch"
    ("" for none), and the model that answers instead, if any."""

    level: int = 0
    text: str = ""
    fallback_model: str | None = None


NO_BROWNOUT = BrownoutView()


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The queue, pressure and brown-out of one model.

    `wait_s` is the expected wait of a typical request at the measured throughput of `tokens_per_s` (prompt
    and expected output; 0 until measured), `pressure` that wait divided by the promised TTFT. `parked`
    requests wait because no worker can serve them. `reserved_tokens` of `kv_tokens` are reserved on workers
    that decode.
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
    """The requests of a router, and the work that it has accounted on workers. In a consistent state, every
    request either runs or waits, and work is accounted for exactly those that run. `leases` are held on
    prefill workers for KV that waits to be pulled."""

    in_flight: int
    running: int
    queued: int
    accounted: int
    leases: int

    @property
    def consistent(self) -> bool:
        """Whether the counts are consistent."""
        return self.running + self.queued == self.in_flight and self.accounted == self.running


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """The KV that workers received over one class of link: transfers, bytes, and the seconds that decode
    workers waited for it. The counts only grow."""

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, moved_bytes: int, seconds: float) -> LinkTransfers:
        """Return the counts with one more transfer."""
        return LinkTransfers(self.transfers + 1, self.bytes + moved_bytes, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of `blocks` blocks with which `prompts` cached prompts begin before they differ. `workers`
    hold its last block."""

    blocks: int
    prompts: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefixView:
    """The largest shared prefixes of one model, by the tokens that sharing saves. `blocks` were read, of
    `block_tokens` tokens each; `complete`: these are all that workers report."""

    model: str
    block_tokens: int
    blocks: int
    complete: bool
    prefixes: tuple[SharedPrefix, ...]


class Lane(Protocol):
    """A fast path to one client for the plain deltas of one stream, which bypasses `on_delta` while `open`;
    see kvasir.native."""

    @property
    def open(self) -> bool: ...

    def close(self) -> None:
        """Send nothing more over the fast path. Idempotent."""
        ...


class StreamSink(Protocol):
    """Receives one request's output on the router's event loop; must not block or raise.

    Any number of `on_delta`, then exactly one of `on_finish` and `on_error`.
    """

    def on_delta(self, delta: Delta) -> None: ...

    def lane(self, request_id: str) -> Lane | None:
        """Return a fast path for the next deltas of this request if it has one choice and its client receives
        deltas unchanged, else None. Called after a delta. The caller closes it before another `on_delta`."""
        ...

    def on_finish(self, summary: RequestSummary) -> None: ...

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None: ...


class AdapterCatalog(Protocol):
    """The adapters that were loaded at run time."""

    def served(self) -> Mapping[str, ServedAdapter]:
        """Return, by name, those for which a request can be served. Cheap: called for each request."""
        ...


class AdapterPort(AdapterCatalog, Protocol):
    """Loads and unloads adapters at run time. Errors are RequestErrors, whose codes are in
    kvasir.telemetry.reasons."""

    async def load(self, model: str | None, name: str, source: str, replicas: int) -> tuple[str, ...]:
        """Load an adapter of `model` (None: the first that can have adapters) on `replicas` workers of each
        of its pools, 0 for all. Return the workers that hold it."""
        ...

    async def unload(self, name: str) -> tuple[str, ...]:
        """Unload an adapter once the requests that use it have ended; new ones are refused at once. Return
        the workers that held it."""
        ...


class RequestPort(Protocol):
    """The request interface of a router. Obligations: every accepted request ends in exactly one on_finish or
    on_error; after `cancel`, which frees the request on every worker, its sink is not called.
    """

    def submit(self, request: Request, sink: StreamSink) -> None:
        """Accept a request. Raises CapacityError if there is no capacity."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request, because its client has disconnected; unknown or finished ids are ignored."""
        ...

    @property
    def adapters(self) -> AdapterCatalog:
        """The adapters that were loaded at run time."""
        ...

    def brownout(self, model: str) -> BrownoutView:
        """Return the state of brown-out for a model; inactive for an unknown one. Cheap: called before each
        request."""
        ...

    def not_ready_reason(self) -> str | None:
        """Return None if a request can be served at once, else what is missing."""
        ...

    def refusing_reason(self) -> str | None:
        """Return None if clients may send requests, else why not. It stays None from the first time that the
        deployment was ready until the router stops: requests then wait for workers that are lost, or are
        refused one by one."""
        ...

    def not_ready_models(self) -> dict[str, str | None]:
        """Return, by model name, None if a request for the model can be served at once, else what is
        missing."""
        ...


class RouterPort(RequestPort, Protocol):
    """The interface of a router within its own process: requests, and views and commands for operators."""

    @property
    def recordings(self) -> RecordingPort:
        """Records requests for readers."""
        ...

    @property
    def adapters(self) -> AdapterPort:
        """Loads and unloads adapters."""
        ...

    def workers(self) -> list[WorkerView]:
        """Return all known workers, ordered by pool and id."""
        ...

    def explain(self, request_id: str) -> DecisionRecord | None:
        """Return the decision for a request in flight or among the last ended ones, else None."""
        ...

    def regret(self) -> Mapping[str, RegretView]:
        """Return the regret of all decisions since the start, by model."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of requests that have not ended."""
        ...

    def running(self, most: int) -> list[RunningView]:
        """Return the requests that have not ended, of each model the `most` that arrived first. Costs a few
        microseconds for each request that is returned, however many run."""
        ...

    def ended(self) -> list[RequestSummary]:
        """Return the summaries of the requests that ended last, of each model from the earliest to the
        latest: those whose decisions are kept."""
        ...

    def running_request(self, request_id: str) -> RunningView | None:
        """Return a request that has not ended, else None."""
        ...

    async def prefixes(self, most: int) -> list[PrefixView]:
        """Return up to `most` of the largest shared prefixes of each model. Reads a bounded part of the
        index, in slices between other work."""
        ...

    def drain(self, worker_id: str, draining: bool, reason: str = "") -> None:
        """Drain a worker, or (`draining` False) return it to service. Returns at once; `workers` shows the
        state when the worker has confirmed it, on this router and on every other. A stopping worker continues
        to drain. Raises RequestError 404 (`worker_not_found`) for an unknown worker, and UpstreamError
        (`session_lost`) for one that is not connected."""
        ...

    def admission(self) -> dict[str, AdmissionView]:
        """Return the queue, pressure and brown-out by model."""
        ...
