"""The router's view of its workers, and the work that it has put on them: the basis of routing decisions.

Reports of workers lag behind decisions, so every decision is accounted as it is made, and released step by
step as its request progresses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from kvasir.config.spec.deployment import HealthSpec
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvStatus
from kvasir.core.requests import EngineLoad, Request, Role, Timings, Usage
from kvasir.ports.routing import CROSS_ROLE, Plan, RequestView, RoutingPolicy, RoutingTarget
from kvasir_router.decide.packing import Decided
from kvasir_router.decide.rates import RateBook
from kvasir_router.decide.roofline import CostRates
from kvasir_router.fleet.columns import Columns
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.health import FleetHealth
from kvasir_router.fleet.place_loads import PlaceLoads, share
from kvasir_router.fleet.reconcile import IndexHits
from kvasir_router.fleet.role_gap import RoleGap
from kvasir_router.fleet.selections import Selections
from kvasir_router.fleet.transfer_counts import TransferCounts
from kvasir_router.fleet.work import Charges, PromptBlocks, TargetLoad, Worker, WorkerState
from kvasir_router.index import FleetIndex, IndexMode, PredictionLedger

__all__ = ["Charges", "Fleet", "HashBlocks", "TargetLoad", "Worker", "WorkerState"]

HashBlocks = Callable[[Request, int], "array[int]"]


class Fleet:
    """Workers, their accounted work, their caches and their costs.

    `hash_blocks(request, block_size)` returns the hashes of the prompt's whole blocks as array('Q'), for
    requests without hashes. `index_modes` are by pool, with HYBRID as the default. `policies` are those that
    requests can name. `decisions` records every plan, and `decided_s` is the duration of the last decision.
    `received` counts transfers, `eased` events that may have made room, and `changed` the changes of the
    serving workers. `gap` is the gap in its roles.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        index: FleetIndex,
        rates: RateBook,
        *,
        hash_blocks: HashBlocks,
        expected_output_tokens: int,
        index_modes: Mapping[str, IndexMode] | None = None,
        policies: Mapping[str, RoutingPolicy] | None = None,
        decisions: DecisionLog | None = None,
        health: HealthSpec | None = None,
        gap: RoleGap | None = None,
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self.index = index
        self.health = FleetHealth(health or HealthSpec())
        self._policy = policy
        self._policies = policies or {}
        self._rates = rates
        self._hash_blocks = hash_blocks
        self._expected_output_tokens = expected_output_tokens
        self._index_modes = index_modes or {}
        self._decisions = decisions
        self._columns = Columns()
        self.gap = gap or RoleGap()
        self._loads = PlaceLoads(self._columns, index.held_blocks, self.gap)
        self._selections = Selections(self._columns, self.workers, index, self.gap)
        self._hits = IndexHits(index)
        self._predictions = PredictionLedger(index)
        self.received = TransferCounts(self.workers)
        # The latest time that a caller passed.
        self._now = 0.0
        self.eased = self.changed = 0
        self.decided_s = 0.0

    @property
    def columns(self) -> Columns:
        """The state of every place; read-only."""
        return self._columns

    # -- workers ---------------------------------------------------------------------------------

    def add(self, worker_id: str, identity: WorkerIdentity, now: float) -> None:
        """Add an unknown worker."""
        mode = self._index_modes.get(identity.pool, IndexMode.HYBRID)
        self.index.add(worker_id, identity, mode, now)
        worker = self.workers[worker_id] = Worker(worker_id, identity)
        self._columns.join(worker, self._rates.join(worker_id, identity))
        self.health.join(worker_id, identity.pool, now)
        self._serving_changed()

    def remove(self, worker_id: str) -> Worker | None:
        """Remove a worker, its cache and all work accounted there."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return None
        self.index.remove(worker_id)
        self._rates.forget(worker_id)
        self.health.leave(worker_id)
        self._hits.forget(worker_id)
        self._columns.leave(worker_id)
        self._serving_changed()
        self._loads.forget(worker)
        return worker

    def mark(
        self,
        worker_id: str,
        *,
        interrupted: bool | None = None,
        draining: str | None = None,
        now: float | None = None,
    ) -> None:
        """Set whether new work may be sent to a worker (see Worker); None keeps a value. Without `now`, the
        time of the last decision is used."""
        worker = self.workers[worker_id]
        now = self._now if now is None else now
        if interrupted is not None:
            worker.interrupted = interrupted
            (self.health.interrupted if interrupted else self.health.resumed)(worker_id, now)
        worker.draining = worker.draining if draining is None else draining
        self._serving_changed()

    def assign(self, roles: Mapping[str, Role]) -> None:
        """Set the roles of workers that differ from their pools' roles; all others get their pool's. Running
        legs end where they are."""
        changed = False
        for worker_id, worker in self.workers.items():
            role = roles.get(worker_id)
            if worker.assigned is not role:
                worker.assigned, changed = role, True
        if changed:
            self._serving_changed()

    def hold(self, worker_id: str, adapters: frozenset[str]) -> None:
        """Set the adapters that a worker has loaded at run time, by key."""
        self.workers[worker_id].adapters = adapters
        self._serving_changed()

    def rates(self, worker_id: str) -> CostRates:
        """Return the learned costs of work there. Raises KeyError for an unknown worker."""
        return self._rates.rates(worker_id)

    def open_gap(self, now: float, *, hurried: bool = False) -> bool:
        """Let any worker serve if a role has been missing for long enough, or at all if `hurried`. Return
        whether that is new."""
        if not self.gap.look(now, hurried=hurried):
            return False
        self._serving_changed()
        return True

    def _serving_changed(self) -> None:
        self.gap.note(self._missing_role(self._ready()))
        self._selections.forget()
        self.changed += 1
        self.eased += 1

    def report(self, worker_id: str, load: EngineLoad) -> None:
        """Store a load that the worker measured, after all deltas of the same step."""
        self.eased += 1
        worker = self.workers[worker_id]
        self._loads.report(worker, load)
        if load.tiers:
            self._believe(self._rates.loaded(worker_id, load.tiers))
            self._columns.write_troubled(worker_id, [tier.medium for tier in load.tiers if not tier.readable])
        for place in self._columns.of_worker(worker_id):
            place.unreported = TargetLoad()
            self._loads.write(place)

    def accepts(self, worker_id: str) -> bool:
        """Whether a new leg may be sent there."""
        worker = self.workers.get(worker_id)
        return worker is not None and worker.state is WorkerState.READY

    # -- decisions -------------------------------------------------------------------------------

    def hashes(self, request: Request) -> array[int]:
        """Return the hashes of the prompt's whole blocks; empty until a worker has reported its block
        size."""
        worker = next(iter(self.workers.values()), None)
        if request.block_hashes or worker is None:
            return request.block_hashes
        return self._hash_blocks(request, worker.identity.kv.block_size)

    def blocks(self, request: Request) -> PromptBlocks:
        """Return the names of the prompt's whole blocks, and what is expected of the output."""
        worker = next(iter(self.workers.values()), None)
        size = 0 if worker is None else worker.identity.kv.block_size
        return PromptBlocks(self.hashes(request), size, self.output_tokens(request) * request.sampling.n)

    def plan(
        self,
        request: Request,
        names: array[int],
        now: float,
        *,
        avoid: Set[str] = frozenset(),
        prefilled_on: RoutingTarget | None = None,
        tentative: bool = False,
    ) -> Plan | None:
        """Return a plan; a `tentative` one leaves no record. Workers in `avoid`, and those that health
        avoids, are chosen only if no others serve. With `prefilled_on`, that place has the KV: only it may
        prefill, and a plan in which it does needs only to decode."""
        any_role = self.gap.open
        if any_role and prefilled_on is not None:
            return None
        log = None if tentative else self._decisions
        began = 0.0 if log is None else log.stopwatch()
        view = RequestView(
            request_id=request.request_id,
            prompt_tokens=len(request.tokens),
            output_tokens=self.output_tokens(request),
            choices=request.sampling.n,
            block_hashes=names,
            priority=request.priority,
            slo=request.slo,
            session=request.session,
            single_worker=any_role or request.sampling.prompt_logprobs is not None,
        )
        named = request.policy
        policy = self._policies.get(named, self._policy) if named else self._policy
        unwell = self.health.avoided(now)
        depths = self.index.match(names)
        for selection in self._selections.of(request, frozenset(avoid), unwell, prefilled_on):
            source = None if prefilled_on is None else selection.targets.index(prefilled_on)
            candidates = selection.candidates(depths, view.prompt_tokens, now, source)
            plan = policy.decide(view, candidates, now)
            if plan is not None:
                plan = replace(plan, reason=CROSS_ROLE) if any_role else plan
                if log is not None:
                    self.decided_s = log.stopwatch() - began
                    decided = Decided(request.arrival_s, now, self.decided_s, request.policy)
                    log.decided(view, candidates, plan, decided, self._selections.describe)
                return plan
        return None

    def missing(self, adapter: str | None = None) -> str | None:
        """Return what is missing to serve an ordinary request at once, with that adapter, in words; None if
        nothing is."""
        ready = self._ready(adapter)
        if self.gap.open and any(worker.any_role for worker in ready):
            return None
        return self._missing_role(ready)

    def _ready(self, adapter: str | None = None) -> list[Worker]:
        ready = WorkerState.READY
        return [each for each in self.workers.values() if each.state is ready and each.has(adapter)]

    def _missing_role(self, ready: list[Worker]) -> str | None:
        roles = [worker.role for worker in ready]
        return self._policy.missing(
            [role is not Role.DECODE for role in roles],
            [role is not Role.PREFILL for role in roles],
            range(len(ready)),
        )

    # -- accounting ------------------------------------------------------------------------------

    def commit(self, request: Request, names: array[int], plan: Plan, now: float) -> Charges:
        """Account the plan's work and predict its blocks. Return the charges, for `settle`; the predictions
        end with `confirm` or `abandon`."""
        self._now = now
        uncached = len(request.tokens) - plan.predicted_cached_tokens
        to_decode, to_prefill = self.kv_need(request, plan)
        charges: Charges = {plan.decode: TargetLoad(streams=request.sampling.n, kv_tokens=to_decode)}
        prefill = TargetLoad(prefill_tokens=uncached, waiting=1, kv_tokens=to_prefill)
        charges.setdefault(plan.prefill_target, TargetLoad()).add(prefill)
        self._predictions.predict(request.request_id, charges, names, now)
        for target, work in charges.items():
            place = self._columns.places[target]
            if work.waiting:
                if not place.prompts:
                    place.head_since_s = now
                place.prompts[id(work)] = work.prefill_tokens
            place.own.add(work)
            place.unreported.add(work)
            self._loads.write(place)
            self._count(place.worker, 1)
        self._loads.sent(uncached)
        return charges

    def cached_tokens(self, names: array[int]) -> int:
        """Return the most tokens of a prompt that any worker has cached, in any tier; 0 without workers."""
        worker = next(iter(self.workers.values()), None)
        if worker is None or not names:
            return 0
        depths = self.index.match(names)
        # argmax and then item: numpy's max takes three times as long.
        return int(depths.item(depths.argmax())) * worker.identity.kv.block_size if depths.size else 0

    def kv_need(self, request: Request, plan: Plan) -> tuple[int, int]:
        """Return the KV tokens that a plan takes where it decodes, and where it prefills if that is another
        worker. A cached prefix is not counted, since other requests may share it; the worker's reports have
        the true use."""
        prompt = len(request.tokens)
        uncached = prompt - plan.predicted_cached_tokens
        output = self.output_tokens(request) * request.sampling.n
        return (uncached + output, 0) if plan.prefill is None else (prompt + output, uncached)

    def settle(self, charges: Charges, target: RoutingTarget, done: TargetLoad) -> None:
        """Subtract `done` from `charges` at `target`; does nothing if the target is gone."""
        charged = charges.get(target)
        if charged is None:
            return
        self.eased += 1
        charged.add(done, -1)
        place = self._columns.places.get(target)
        if place is not None:
            place.own.add(done, -1)
            place.unreported.at_most(place.own)
            place.computed_tokens += done.prefill_tokens
            if done.waiting:
                charged.mark = place.computed_tokens
                if id(charged) == next(iter(place.prompts)):
                    place.head_since_s = self._now
                del place.prompts[id(charged)]
            self._loads.write(place)
        if charged.nothing:
            del charges[target]
            if place is not None:
                self._count(place.worker, -1)

    def confirm(self, request_id: str, target: RoutingTarget, now: float) -> None:
        """The request's prompt was computed at `target`, or arrived there: its predicted blocks are
        cached."""
        self._now = now
        self._predictions.confirm(request_id, target, now)

    def abandon(self, request_id: str) -> None:
        """Drop the predictions for the request that have not been confirmed."""
        self._predictions.abandon(request_id)

    def measured(
        self,
        target: RoutingTarget,
        usage: Usage,
        timings: Timings,
        charges: Charges | None = None,
        source: RoutingTarget | None = None,
    ) -> None:
        """Learn from a leg that ended well and received what `source` prefilled. Call before its `charges`
        are settled: they show which other prompts were computed beside it."""
        place = self._columns.places[target]
        charged = None if charges is None else charges.get(target)
        beside = 0 if charged is None or charged.waiting else max(0, place.computed_tokens - charged.mark)
        streams = place.own.streams + share(place.worker.foreign, place)
        link = self.received.count(source, place.worker, usage, timings)
        changed = self._rates.observe(
            target.worker_id, usage, timings, streams=streams, beside_tokens=beside, link=link, now=self._now
        )
        self._believe(changed)

    def reconcile(self, request: Request, plan: Plan, usage: Usage, now: float) -> None:
        """Compare the predicted hit of a request that ended well with the one that its engine found; a worker
        on which they keep differing is demoted."""
        # Later choices of a request hit what the first one computed.
        if request.sampling.n == 1:
            self._hits.compare(plan, usage, now)

    def kv_status(self, worker_id: str) -> KvStatus | None:
        """Return the worker's cache as the router tracks it; None for an unknown worker."""
        return self._hits.status(worker_id)

    def accounted(self) -> Charges:
        """All accounted work by target; for checks and metrics."""
        places = self._columns.places.items()
        return {target: place.own.copy() for target, place in places if not place.own.nothing}

    @property
    def predicted(self) -> int:
        """Number of requests with predictions that are neither confirmed nor abandoned; for checks."""
        return len(self._predictions)

    def _believe(self, workers: Set[str]) -> None:
        """Write changed rates to the columns, usually those of all workers."""
        alike: dict[CostRates, list[str]] = {}
        for worker_id in workers:
            alike.setdefault(self._rates.rates(worker_id), []).append(worker_id)
        for rates, worker_ids in alike.items():
            self._columns.write_rates(worker_ids, rates)

    def _count(self, worker: Worker, by: int) -> None:
        worker.charged += by
        self.health.loaded(worker.worker_id, worker.charged, self._now)

    def output_tokens(self, request: Request) -> int:
        """Expected output tokens of each choice."""
        limit = request.sampling.max_tokens
        expected = self._expected_output_tokens
        return expected if limit is None else min(limit, expected)
