"""Answers of operators' pages about requests and about what is wrong with the deployment."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Severity = Literal["down", "degraded", "warning"]
PhaseName = Literal["queue", "engine_queue", "tiers", "prefill", "transfer", "decode", "stream"]


class RunningRequest(Struct):
    """A request that has not ended. Times in seconds: `age_s` since its arrival, `queued_s` until it was sent
    to a worker, null while it waits; `ttft_s` is null before the first token. `output_tokens` is what its
    client has."""

    request_id: str
    model: str
    tenant: str
    slo: str
    phase: str
    age_s: float
    queued_s: float | None
    ttft_s: float | None
    prompt_tokens: int
    output_tokens: int
    predicted_cached_tokens: int
    prefill_worker: str | None
    decode_worker: str | None
    retries: int
    migrations: int


class FinishedRequest(Struct):
    """A request that has ended, `ended_s_ago` seconds ago. `outcome` is `ok` or an error code, `itl_s` the
    mean time between tokens; `slo_met` is null where that is not judged."""

    request_id: str
    model: str
    tenant: str
    slo: str
    outcome: str
    ended_s_ago: float
    e2e_s: float
    queued_s: float | None
    ttft_s: float | None
    itl_s: float | None
    slo_met: bool | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    prefill_worker: str | None
    decode_worker: str | None
    retries: int
    migrations: int


class RequestsPage(Struct):
    """Requests of the router. `running` are those that arrived first, `slowest` the longest and `latest` the
    newest of the ended requests that are kept (`routing.decision_records`)."""

    in_flight: int
    queued: int
    running: list[RunningRequest]
    slowest: list[FinishedRequest]
    latest: list[FinishedRequest]


class RecentRequests(Struct):
    """The `answered` requests of the last `over_s` seconds: of a minute, or of less if more requests ended in
    it than are kept (`routing.decision_records`). `ttft_s` and `itl_s` are medians, null without any;
    `hit_rate` is the cached fraction of the tokens of their prompts, null without any prompt."""

    over_s: float
    answered: int
    ttft_s: float | None
    ttft_p95_s: float | None
    itl_s: float | None
    itl_p95_s: float | None
    hit_rate: float | None


class TimelinePhase(Struct):
    """A part of a request's time: from `start_s` to `end_s` after its arrival, on `worker`, null in the
    router."""

    phase: PhaseName
    start_s: float
    end_s: float
    worker: str | None


class WorkerClaim(Struct):
    """What a request claims of one worker, in seconds: of computing its prompt, of steps, of memory that it
    held, and of memory that it held while KV moved. `wasted_s` is work that no client is charged for. Claims
    are proportions, by which the busy time of a pool is divided."""

    worker_id: str
    pool: str
    prefill_s: float
    decode_s: float
    kv_s: float
    transfer_s: float
    wasted_s: float


class RequestTimeline(Struct):
    """Where the time of a request went. Its phases follow each other without gaps. `outcome` is null while it
    runs; `running` is the phase of the router's record then, null afterwards. `route` is null if the client
    named a model; else `arm` is the model or adapter that the route chose. `claims` are null while it runs,
    or if costs are not counted, and empty if it reached no worker."""

    request_id: str
    model: str
    tenant: str
    slo: str
    outcome: str | None
    running: str | None
    total_s: float
    ttft_s: float | None
    itl_s: float | None
    slo_met: bool | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    transferred_bytes: int
    retries: int
    migrations: int
    phases: list[TimelinePhase]
    route: str | None = None
    arm: str | None = None
    claims: list[WorkerClaim] | None = None


class SizeForecast(Struct):
    """Why the planner wants a size: the present `load`, the `expected` one when a new replica would serve,
    and that with its margin (`upper`), in busy replicas; `because` are the rules that decided."""

    load: float
    expected: float
    upper: float
    because: list[str]


class PoolSize(Struct):
    """A pool: the `desired` replicas, of the planner or else of kvasir.yaml, and the workers that are
    `serving` and `starting`. Without a planner there is no `forecast`."""

    pool: str
    model: str
    role: str
    desired: int
    serving: int
    starting: int
    forecast: SizeForecast | None = None


class StatusProblem(Struct, frozen=True):
    """Something that is wrong. `down`: requests fail; `degraded`: they are served worse than promised;
    `warning`: they are served, and that may end. `subject` is the model, pool, worker or file; `remedy` says
    what to do."""

    severity: Severity
    code: str
    subject: str
    text: str
    remedy: str


class StatusVerdict(Struct):
    """Whether all is well, in one sentence, and what is not, the most severe first."""

    ok: bool
    sentence: str
    problems: list[StatusProblem]


class RolloutOrdered(Struct):
    """The rollout of a route with a canary. `phase`: idle, running, paused, promoted, rolled_back; it has
    lasted `for_s`, null before the first start. The canary gets the fraction `share` of requests. `compared`
    requests of the present step were compared. `evidence` is the natural logarithm of the evidence that the
    canary is worse, by criterion; at `threshold` it is rolled back. `counts` are those of the present run.
    `shared`: other routers decide too; their counts were last read `stale_s` seconds ago."""

    route: str
    model: str | None
    canary: str
    phase: str
    share: float
    step: int | None
    steps: list[float]
    for_s: float | None
    reason: str
    compared: int
    min_requests: int
    counts: dict[str, int]
    evidence: dict[str, float]
    threshold: float
    shared: bool
    stale_s: float


class RolloutsPage(Struct):
    """The rollouts of all routes with a canary."""

    rollouts: list[RolloutOrdered]


class RouteStatus(Struct):
    """A route: the models or routes of its arms, its fallbacks, and the rollout of its canary if it has
    one."""

    route: str
    arms: list[str]
    fallbacks: list[str]
    rollout: RolloutOrdered | None
