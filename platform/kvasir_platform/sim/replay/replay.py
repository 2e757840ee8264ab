"""A trace replayed on simulated workers through the router's own index, accounting and policies.

The router's side is production code: Fleet plans, commits, confirms, settles and measures as the request
machine has it do, and FleetIndex follows the workers by their batches of changes. Only message delivery is
replaced, by a heap of events in virtual time. A worker reports what happened (blocks stored and evicted,
prompts computed, legs ended, its load) after `report_delay_s`, in one message.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise

from kvasir.config.spec.edge import GatewaySpec
from kvasir.core.kv import KvBatch, KvSnapshotPart
from kvasir.core.requests import EngineLoad, Leg, Request, Role, SloClass, Timings, Usage
from kvasir.ports.routing import Plan, RoutingPolicy, RoutingTarget
from kvasir_platform.sim.replay.cache import BlockCache
from kvasir_platform.sim.replay.outcome import ReplayOutcome, WorkerOutcome
from kvasir_platform.sim.replay.replica import MODEL, SimReplica
from kvasir_platform.sim.replay.worker import Happened, Job, ReplayWorker
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS
from kvasir_platform.workload.requests import Workload
from kvasir_router.decide import RateBook
from kvasir_router.fleet.fleet import Charges, Fleet, TargetLoad
from kvasir_router.index import FetchSnapshot, FleetIndex

_TICK_S = 0.25
_EPOCH = 1
_REST_S = 2.0
EXPECTED_OUTPUT_TOKENS = GatewaySpec().default_max_tokens
"""What production expects of a request that sets no limit of its own; a trace does not tell limits."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The replay's setting. `speed_up` divides the time between arrivals. `prefill_workers` and
    `decode_workers` are pools of one role; `workers` do both. The router begins with the rates of
    `make_rates`, by default production's estimates for the replica's hardware."""

    trace: Workload
    replica: SimReplica
    slo: SloClass
    speed_up: float
    workers: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    seed: int = 1
    report_delay_s: float = 0.05
    predicted_ttl_s: float = 120.0
    make_rates: Callable[[], RateBook] = RateBook

    def __post_init__(self) -> None:
        if self.trace.block_tokens != TRACE_BLOCK_TOKENS:
            raise ValueError(f"blocks of {self.trace.block_tokens} tokens; workers have {TRACE_BLOCK_TOKENS}")

    @property
    def roles(self) -> tuple[Role, ...]:
        """One per worker."""
        return (
            *(Role.BOTH,) * self.workers,
            *(Role.PREFILL,) * self.prefill_workers,
            *(Role.DECODE,) * self.decode_workers,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _SimRequest:
    """A running request. Its tokens are not kept: thousands wait at once in a fleet that is too small."""

    request_id: str
    plan: Plan
    charges: Charges
    arrival_s: float


@dataclass(frozen=True, slots=True)
class _Message:
    """A message from a worker to the router."""

    worker: ReplayWorker
    happened: Happened
    log: bytes
    load: EngineLoad


class TraceReplay:
    """One run. `policy` is a new object, because it may learn."""

    def __init__(self, setting: Setting, policy: RoutingPolicy) -> None:
        self._setting = setting
        trace, replica = setting.trace, setting.replica
        blocks = (replica.device_blocks + replica.cpu_blocks) * len(setting.roles)
        self._index = FleetIndex(
            capacity_blocks=4 * blocks,
            predicted_blocks=blocks,
            predicted_ttl_s=setting.predicted_ttl_s,
        )
        requests = trace.requests
        self._fleet = Fleet(
            policy,
            self._index,
            setting.make_rates(),
            hash_blocks=lambda request, _: request.block_hashes,
            expected_output_tokens=EXPECTED_OUTPUT_TOKENS,
        )
        parents = _parents(trace)
        self._workers: dict[str, ReplayWorker] = {}
        self._sequences: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        for number, role in enumerate(setting.roles):
            worker_id = f"w{number:03d}"
            cache = BlockCache(replica.device_blocks, replica.cpu_blocks, parents)
            self._workers[worker_id] = ReplayWorker(worker_id, replica, cache)
            self._sequences[worker_id] = 0
            self._versions[worker_id] = 0
            self._fleet.add(worker_id, replica.identity(worker_id, role), 0.0)
        self._catch_up()
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._held: deque[tuple[int, float]] = deque()
        self._request_states: dict[int, _SimRequest] = {}
        self._outcome = ReplayOutcome(len(requests))
        self._arrivals = [request.arrival_s / setting.speed_up for request in requests]
        self._next = self._due = 0

    @property
    def fleet(self) -> Fleet:
        """The router's view; for checks."""
        return self._fleet

    @property
    def workers(self) -> tuple[ReplayWorker, ...]:
        """The workers' actual state; for checks."""
        return tuple(self._workers.values())

    def settle(self) -> None:
        """After a run: deliver the workers' last messages, and let predicted entries expire."""
        until = self._heap[0][0] + _REST_S
        while self._heap[0][0] <= until:
            now, _, act = heappop(self._heap)
            act(now)

    def run(self, *, most_misses: int | None = None) -> ReplayOutcome:
        """Run to the end, or until more than `most_misses` requests have missed the SLO."""
        heap, arrivals = self._heap, self._arrivals
        self._at(_TICK_S, self._tick)
        outcome, total = self._outcome, len(arrivals)
        while outcome.ended < total:
            if self._next < total and arrivals[self._next] <= heap[0][0]:
                number, self._next = self._next, self._next + 1
                self._arrive(number, arrivals[number], arrivals[number])
            else:
                now, _, act = heappop(heap)
                act(now)
            if most_misses is not None and outcome.misses > most_misses:
                break
        outcome.workers = tuple(
            WorkerOutcome(w.worker_id, role, w.work_s, w.busy_s, w.prefilled_tokens, w.generated_tokens)
            for role, w in zip(self._setting.roles, self._workers.values(), strict=True)
        )
        return outcome

    # -- the router's side -----------------------------------------------------------------------

    def _arrive(self, number: int, arrival_s: float, now: float) -> None:
        traced, setting = self._setting.trace.requests[number], self._setting
        request = Request(
            request_id=str(number),
            model=MODEL,
            tokens=array("I", bytes(4 * traced.prompt_tokens)),
            arrival_s=arrival_s,
            block_hashes=traced.names,
            slo=setting.slo,
            session=traced.session,
        )
        plan = self._fleet.plan(request, traced.names, now)
        if plan is None:
            self._held.append((number, arrival_s))
            return
        charges = self._fleet.commit(request, traced.names, plan, now)
        self._request_states[number] = _SimRequest(request.request_id, plan, charges, arrival_s)
        target = plan.prefill_target
        self._fleet.workers[target.worker_id].legs[request.request_id] = request.request_id
        leg = Leg.FULL if plan.prefill is None else Leg.PREFILL
        self._submit(target, Job(number, traced, leg, now), now)

    def _submit(self, target: RoutingTarget, job: Job, now: float) -> None:
        worker = self._workers[target.worker_id]
        worker.submit(job, now)
        self._wake(worker, now)

    def _receive(self, message: _Message, now: float) -> None:
        """What the request machine does with a step of a worker."""
        worker_id = message.worker.worker_id
        if message.log:
            self._sequences[worker_id] += 1
            batch = KvBatch(_EPOCH, self._sequences[worker_id], message.log)
            self._index.apply(worker_id, batch, now)
        for job in message.happened.computed:
            self._prefilled(job, RoutingTarget(worker_id), now)
        for job in message.happened.ended:
            self._leg_ended(job, RoutingTarget(worker_id), now)
        self._fleet.report(worker_id, message.load)
        for _ in range(len(self._held)):
            self._arrive(*self._held.popleft(), now)

    def _prefilled(self, job: Job, target: RoutingTarget, now: float) -> None:
        request_state = self._request_states[job.number]
        self._fleet.confirm(request_state.request_id, target, now)
        if job.leg is Leg.FULL:
            charged = request_state.charges.get(target, TargetLoad())
            self._fleet.settle(request_state.charges, target, charged.prompt())

    def _leg_ended(self, job: Job, target: RoutingTarget, now: float) -> None:
        request_state = self._request_states[job.number]
        request_id = request_state.request_id
        sender = request_state.plan.prefill
        self._fleet.measured(target, _usage(job), _timings(job), request_state.charges, sender)
        del self._fleet.workers[target.worker_id].legs[request_id]
        if job.leg is Leg.PREFILL:
            charged = request_state.charges[target]
            self._fleet.settle(request_state.charges, target, _copy(charged))
            decode = request_state.plan.decode
            self._fleet.workers[decode.worker_id].legs[request_id] = request_id
            source = self._workers[target.worker_id]
            job = Job(job.number, job.request, Leg.DECODE, now, source=source, source_job=job)
            self._submit(decode, job, now)
            return
        self._fleet.abandon(request_id)
        for place, work in list(request_state.charges.items()):
            self._fleet.settle(request_state.charges, place, _copy(work))
        del self._request_states[job.number]

    def _tick(self, now: float) -> None:
        self._index.tick(now)
        while self._due < self._next and self._arrivals[self._due] + self._setting.slo.ttft_s < now:
            self._outcome.overdue(self._due)
            self._due += 1
        self._at(now + _TICK_S, self._tick)

    def _catch_up(self) -> None:
        """Snapshots of empty workers."""
        for effect in self._index.tick(0.0):
            if isinstance(effect, FetchSnapshot):
                part = KvSnapshotPart(_EPOCH, 0, b"", last=True)
                self._index.snapshot_part(effect.worker_id, effect.attempt, part, 0.0)
                self._index.snapshot_ended(effect.worker_id, effect.attempt, None, 0.0)

    # -- the workers' side -----------------------------------------------------------------------

    def _wake(self, worker: ReplayWorker, now: float) -> None:
        """Schedule one event for the next change of a worker; an earlier appointment is void."""
        version = self._versions[worker.worker_id] = self._versions[worker.worker_id] + 1
        due = worker.next_event_s
        if due == float("inf"):
            return

        def happen(now: float) -> None:
            if self._versions[worker.worker_id] == version:
                self._happened(worker, worker.advance(now), now)

        self._at(max(due, now), happen)

    def _happened(self, worker: ReplayWorker, happened: Happened, now: float) -> None:
        for job in happened.computed:
            self._computed(job, now)
        for job in happened.ended:
            if job.leg is not Leg.PREFILL:
                self._outcome.end(job.number, self._setting.slo)
        log = worker.cache.take_log()
        if log or happened.computed or happened.ended:
            message = _Message(worker, happened, log, worker.load)
            self._at(now + self._setting.report_delay_s, lambda at: self._receive(message, at))
        self._wake(worker, now)

    def _computed(self, job: Job, now: float) -> None:
        if job.source is not None and job.source_job is not None:
            job.source.let_go(job.source_job, now)
            self._wake(job.source, now)
        request_state = self._request_states[job.number]
        if job.leg is not Leg.DECODE:
            self._outcome.cached(job.number, job.cached_tokens, request_state.plan.predicted_cached_tokens)
        if job.leg is not Leg.PREFILL:
            self._outcome.first_token(job, job.first_s - request_state.arrival_s, self._setting.slo)

    def _at(self, due: float, act: Callable[[float], None]) -> None:
        heappush(self._heap, (due, next(self._order), act))


def _copy(work: TargetLoad) -> TargetLoad:
    return TargetLoad(work.prefill_tokens, work.waiting, work.streams, work.kv_tokens)


def _parents(trace: Workload) -> dict[int, int]:
    """The block before each; 0 for none."""
    parents: dict[int, int] = {}
    for request in trace.requests:
        if request.names:
            parents[request.names[0]] = 0
        parents.update((child, parent) for parent, child in pairwise(request.names))
    return parents


def _usage(job: Job) -> Usage:
    request = job.request
    pulled = request.prompt_tokens - job.cached_tokens if job.leg is Leg.DECODE else 0
    return Usage(
        prompt_tokens=request.prompt_tokens,
        cached_tokens=job.cached_tokens,
        transferred_tokens=pulled,
        transferred_bytes=job.moved_bytes,
        output_tokens=1 if job.leg is Leg.PREFILL else request.output_tokens,
        tier_tokens=job.hit.from_cpu * TRACE_BLOCK_TOKENS,
    )


def _timings(job: Job) -> Timings:
    until_prompt = job.computed_s - job.started_s
    decode = job.leg is Leg.DECODE
    return Timings(
        queue_s=job.started_s - job.queued_s,
        prefill_s=0.0 if decode else until_prompt - job.load_s,
        transfer_s=until_prompt if decode else 0.0,
        decode_s=job.finished_s - job.computed_s,
        tier_s=job.load_s,
    )
