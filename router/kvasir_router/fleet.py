"""What the router knows of its workers, and what it has put on them: the ground that policies decide on.

Reported loads lag by a step and a network, so the router counts its own work from the moment it decides;
a report only adds what other routers have put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import EngineLoad, Request, Role, Timings, Usage
from kvasir.ports.routing import Candidate, Plan, RequestView, RoutingPolicy, Target
from kvasir_router.decide.rates import RateBook
from kvasir_router.index import Owner, PrefixIndex

HashBlocks = Callable[[Request, int], tuple[int, ...]]


class WorkerState(StrEnum):
    """Whether new work may be sent."""

    READY = "ready"
    INTERRUPTED = "interrupted"
    DRAINING = "draining"


@dataclass(slots=True)
class Worker:
    """One worker's session. `legs` maps what runs there to requests; `ghosts` are aborted legs whose
    last delta has not come, with the time of the abort. `foreign` is the number of requests there
    that are not ours, `foreign_waiting` those of them that have not begun. `draining` says why it takes
    nothing new, "" if it does."""

    worker_id: str
    identity: WorkerIdentity
    interrupted: bool = False
    draining: str = ""
    legs: dict[str, str] = field(default_factory=dict)
    ghosts: dict[str, float] = field(default_factory=dict)
    load: EngineLoad | None = None
    foreign: int = 0
    foreign_waiting: int = 0

    @property
    def state(self) -> WorkerState:
        """Whether new work may be sent."""
        if self.interrupted:
            return WorkerState.INTERRUPTED
        return WorkerState.DRAINING if self.draining else WorkerState.READY

    def abandon(self, leg_id: str, now: float) -> None:
        """The leg is no longer ours, and will still say its last."""
        del self.legs[leg_id]
        self.ghosts[leg_id] = now

    def forget_ghosts(self, before: float) -> None:
        """Give up on legs that were aborted until `before` and never said their last."""
        for leg_id in [leg_id for leg_id, since in self.ghosts.items() if since <= before]:
            del self.ghosts[leg_id]

    def report(self, load: EngineLoad) -> None:
        """Take in a load that was measured by the worker."""
        self.load = load
        self.foreign = max(0, load.running + load.waiting - len(self.legs) - len(self.ghosts))
        self.foreign_waiting = min(self.foreign, load.waiting)


@dataclass(slots=True)
class Work:
    """What is accounted at one target: prompt tokens to prefill, streams to decode, KV tokens."""

    prefill_tokens: int = 0
    streams: int = 0
    kv_tokens: int = 0

    def add(self, other: Work, sign: int = 1) -> None:
        """Add, or with sign -1 take away."""
        self.prefill_tokens += sign * other.prefill_tokens
        self.streams += sign * other.streams
        self.kv_tokens += sign * other.kv_tokens


Charges = dict[Target, Work]


class Fleet:
    """Workers, their accounted work, their predicted caches and measured rates.

    `hash_blocks(request, block_size)` names the prompt's whole blocks; it is asked only for requests
    that do not carry their hashes.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        index: PrefixIndex,
        rates: RateBook,
        *,
        hash_blocks: HashBlocks,
        expected_output_tokens: int,
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self.index = index
        self._policy = policy
        self._rates = rates
        self._hash_blocks = hash_blocks
        self._expected_output_tokens = expected_output_tokens
        self._work: Charges = {}

    def add(self, worker_id: str, identity: WorkerIdentity) -> None:
        """A worker that nothing was known of."""
        self.workers[worker_id] = Worker(worker_id, identity)

    def remove(self, worker_id: str) -> Worker | None:
        """Forget a worker, its cache and all work accounted there."""
        self.index.remove_worker(worker_id)
        self._rates.forget(worker_id)
        for target in [target for target in self._work if target.worker_id == worker_id]:
            del self._work[target]
        return self.workers.pop(worker_id, None)

    def accepts(self, worker_id: str) -> bool:
        """Whether a new leg may be sent there."""
        worker = self.workers.get(worker_id)
        return worker is not None and worker.state is WorkerState.READY

    def hashes(self, request: Request) -> tuple[int, ...]:
        """The names of the prompt's whole blocks; none while no worker has told the block size."""
        worker = next(iter(self.workers.values()), None)
        if request.block_hashes or worker is None:
            return request.block_hashes
        return self._hash_blocks(request, worker.identity.kv.block_size)

    def plan(
        self,
        request: Request,
        hashes: tuple[int, ...],
        now: float,
        *,
        avoid: Set[str] = frozenset(),
        prefilled_on: Target | None = None,
    ) -> Plan | None:
        """Decide. Workers in `avoid` are taken only where no others serve. With `prefilled_on` the KV
        lies there already, and a plan that has it as its prefill target needs to decode only."""
        workers = [
            worker
            for worker in self.workers.values()
            if worker.state is WorkerState.READY and _serves(worker.identity, request)
        ]
        if prefilled_on is not None:
            source = self.workers[prefilled_on.worker_id]
            workers = [
                source,
                *(w for w in workers if w is not source and w.identity.role is not Role.PREFILL),
            ]
        depths = self.index.match(hashes)
        view = RequestView(
            request_id=request.request_id,
            prompt_tokens=len(request.tokens),
            output_tokens=self._output_tokens(request),
            choices=request.sampling.n,
            block_hashes=hashes,
            priority=request.priority,
        )
        preferred = [worker for worker in workers if worker.worker_id not in avoid]
        for among in (preferred, workers) if len(preferred) < len(workers) else (workers,):
            candidates = self._candidates(among, request, depths)
            plan = self._policy.decide(view, candidates, now)
            if plan is not None:
                return plan
        return None

    def commit(self, request: Request, hashes: tuple[int, ...], plan: Plan, now: float) -> Charges:
        """Account the plan's work and predict its blocks; returns what to give back to `settle`."""
        prompt = len(request.tokens)
        output = self._output_tokens(request) * request.sampling.n
        charges: Charges = {plan.decode: Work(streams=request.sampling.n, kv_tokens=prompt + output)}
        prefill = Work(
            prefill_tokens=prompt - plan.predicted_cached_tokens,
            kv_tokens=prompt if plan.prefill is not None else 0,
        )
        charges.setdefault(plan.prefill_target, Work()).add(prefill)
        for target, work in charges.items():
            self._work.setdefault(target, Work()).add(work)
            self.index.insert(Owner(*target), hashes, now)
        return charges

    def settle(self, charges: Charges, target: Target, done: Work) -> None:
        """Take `done` off what `charges` account at `target`; nothing where the target is gone."""
        charged = charges.get(target)
        if charged is None:
            return
        charged.add(done, -1)
        if charged == Work():
            del charges[target]
        total = self._work.get(target)
        if total is not None:
            total.add(done, -1)
            if total == Work():
                del self._work[target]

    def measured(self, target: Target, usage: Usage, timings: Timings) -> None:
        """Learn rates from a leg that ended well."""
        worker = self.workers[target.worker_id]
        streams = self._work.get(target, Work()).streams + worker.foreign
        self._rates.observe(target.worker_id, usage, timings, streams)

    def missing(self) -> str | None:
        """What is lacking to serve an ordinary request at once, in words."""
        ready = [worker for worker in self.workers.values() if worker.state is WorkerState.READY]
        return self._policy.missing([self._candidate(worker, 0, 0, 0) for worker in ready])

    def accounted(self) -> Charges:
        """All accounted work by target; for checks and metrics."""
        return {target: Work(w.prefill_tokens, w.streams, w.kv_tokens) for target, w in self._work.items()}

    def _output_tokens(self, request: Request) -> int:
        limit = request.sampling.max_tokens
        expected = self._expected_output_tokens
        return expected if limit is None else min(limit, expected)

    def _candidates(
        self, workers: Iterable[Worker], request: Request, depths: dict[Owner, int]
    ) -> list[Candidate]:
        prompt = len(request.tokens)
        candidates = []
        for worker in workers:
            block_size = worker.identity.kv.block_size
            # Engines compute at least the last prompt token, to have something to sample from.
            most = (prompt - 1) // block_size * block_size
            for rank in range(worker.identity.data_parallel_size):
                depth = depths.get(Owner(worker.worker_id, rank), 0)
                cached = max(0, min(depth * block_size, most))
                candidates.append(self._candidate(worker, rank, cached, prompt))
        return candidates

    def _candidate(self, worker: Worker, rank: int, cached: int, prompt: int) -> Candidate:
        identity = worker.identity
        kv, ranks = identity.kv, identity.data_parallel_size
        target = Target(worker.worker_id, rank)
        work = self._work.get(target, Work())
        kv_tokens = max(1, identity.kv_blocks * kv.block_size)
        used = worker.load.kv_usage * kv_tokens if worker.load is not None else 0.0
        return Candidate(
            target=target,
            pool=identity.pool,
            role=identity.role,
            rates=self._rates.rates(worker.worker_id),
            cached_tokens=cached,
            # Of a foreign request nothing is known but that it waits: suppose that it is like this one.
            queued_prefill_tokens=work.prefill_tokens + worker.foreign_waiting * prompt // ranks,
            streams=work.streams + worker.foreign // ranks,
            reserved_kv_tokens=max(work.kv_tokens, int(used)),
            held_tokens=self.index.held(Owner(worker.worker_id, rank)) * kv.block_size,
            kv_tokens=kv_tokens,
            kv_token_bytes=kv.bytes_per_block * kv.tensor_parallel_size / kv.block_size,
        )


def _serves(identity: WorkerIdentity, request: Request) -> bool:
    return identity.model == request.model and (
        request.adapter is None or request.adapter in identity.adapters
    )
