"""The router of a simulated run: production decisions, with messages in place of sessions.

Fleet, index, policy and admission are the router's own, called in the order in which the request machine
calls them. A request is judged by admission, placed, accounted, confirmed and settled as in production; after
the loss of a worker it goes on elsewhere with its output so far as part of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from kvasir.core.errors import CapacityError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvBatch, KvSnapshotPart
from kvasir.core.requests import EngineLoad, Leg, Request, Sampling
from kvasir.performance.coefficients import DATA_SHEET
from kvasir.ports.router import RequestSummary
from kvasir.ports.routing import Plan, RoutingTarget
from kvasir_platform.sim.engine.replica import SIM_MODEL
from kvasir_platform.sim.engine.sequence import EngineLeg
from kvasir_platform.sim.server.requests import SimulatedRequest, timings_of, tokens_of, usage_of
from kvasir_platform.sim.server.results import RequestTimes
from kvasir_platform.sim.server.setting import ServerSetting, SimCounters, SimulatedPool
from kvasir_router.admission import Admission
from kvasir_router.decide import CostRates, RateBook, make_policy, rates_of
from kvasir_router.demand import DemandBook
from kvasir_router.fleet.fleet import Fleet, TargetLoad
from kvasir_router.index import FetchSnapshot, FleetIndex

_EPOCH = 1
_SAMPLING = Sampling()

Submit = Callable[[str, EngineLeg, float], None]
LetGo = Callable[[str, EngineLeg, float], None]


class SimulatedRouter:
    """`submit` sends a leg to a worker, and `let_go` releases what a prefill leg keeps. `times` gets the
    outcome of each request."""

    def __init__(
        self, setting: ServerSetting, times: RequestTimes, submit: Submit, let_go: LetGo, blocks: int
    ) -> None:
        self._setting = setting
        self._times = times
        self._submit, self._let_go = submit, let_go
        self.index = FleetIndex(
            capacity_blocks=4 * blocks, predicted_blocks=blocks, predicted_ttl_s=setting.predicted_ttl_s
        )
        policy = make_policy(setting.policy, setting.disaggregation, Random(setting.seed))  # noqa: S311
        self.fleet = Fleet(
            policy,
            self.index,
            RateBook(_priors(setting.pools)),
            hash_blocks=lambda request, _: request.block_hashes,
            expected_output_tokens=setting.expected_output,
        )
        self.admission = Admission(self.fleet, setting.admission)
        self.counters = SimCounters()
        self.demand = DemandBook()
        self.states: dict[str, SimulatedRequest] = {}
        self._sequences: dict[str, int] = {}
        self._block = setting.block_tokens

    # -- workers -------------------------------------------------------------------------------------

    def joined(self, worker_id: str, identity: WorkerIdentity, now: float) -> None:
        """A worker serves, with an empty cache."""
        self._sequences[worker_id] = 0
        self.fleet.add(worker_id, identity, now)
        self._index_tick(now)
        self._unpark(now)
        self.run_queue(now)

    def lost(self, worker_id: str, now: float) -> None:
        """A worker is gone: what ran there goes on elsewhere."""
        if self.fleet.remove(worker_id) is None:
            return
        for state in list(self.states.values()):
            for target in [target for target in state.charges if target.worker_id == worker_id]:
                del state.charges[target]
            if state.held_at == worker_id:
                state.lease = None
            if state.at == worker_id and state.leg is not None:
                self._again(state, state.leg, now)
        self.run_queue(now)

    def drain(self, worker_id: str, why: str) -> None:
        """Send nothing more there."""
        if worker_id in self.fleet.workers:
            self.fleet.mark(worker_id, draining=why)

    def left(self, worker_id: str, now: float) -> None:
        """A drained worker is gone, and nothing ran there."""
        self.lost(worker_id, now)

    # -- arrivals ------------------------------------------------------------------------------------

    def arrive(self, number: int, now: float) -> None:
        """A request arrives: it starts, waits, or is refused."""
        traced = self._setting.workload.requests[number]
        request = Request(
            request_id=str(number),
            model=SIM_MODEL,
            tokens=tokens_of(traced.prompt_tokens),
            sampling=_SAMPLING,
            arrival_s=now,
            block_hashes=traced.names,
            slo=self._setting.slo,
            session=traced.session,
            tenant=traced.tenant,
        )
        self.demand.arrived(request)
        admission = self.admission
        try:
            request = admission.reduced(request)
            ticket = admission.ticket(request, now)
            state = SimulatedRequest(number, request, ticket, max(1, traced.output_tokens))
            if ticket.long:
                ticket.fresh_tokens = traced.prompt_tokens - self.fleet.cached_tokens(traced.names)
            plan: Plan | None = None
            served = True
            if admission.may_begin(ticket, now):
                plan, served = self._fitting(state, now)
            if plan is None:
                admission.wait(ticket, now, served=served)
        except CapacityError as error:
            self.counters.refused[error.code] = self.counters.refused.get(error.code, 0) + 1
            self.demand.refused()
            self._times.refuse(number)
            return
        self.states[request.request_id] = state
        if plan is not None:
            self._start(state, plan, now)

    def _plan(self, state: SimulatedRequest, now: float, avoid: frozenset[str] = frozenset()) -> Plan | None:
        self.counters.decisions += 1
        return self.fleet.plan(state.request, state.request.block_hashes, now, avoid=avoid)

    def _fitting(self, state: SimulatedRequest, now: float) -> tuple[Plan | None, bool]:
        """Return a plan whose places have room, and whether any worker serves the request."""
        plan = self._plan(state, now)
        if plan is None:
            return None, False
        crowded = self.admission.crowded(state.ticket, state.request, plan, now)
        if not crowded:
            return plan, True
        if not self.admission.takes(state.ticket):
            return None, True
        return self._plan(state, now, crowded) or plan, True

    def _start(self, state: SimulatedRequest, plan: Plan, now: float) -> None:
        self.admission.begins(state.ticket, now)
        request = state.request
        state.plan, state.started_s = plan, now
        state.charges = self.fleet.commit(request, request.block_hashes, plan, now)
        kind = Leg.FULL if plan.prefill is None else Leg.PREFILL
        self._send(state, kind, plan.prefill_target, now)

    def _send(self, state: SimulatedRequest, kind: Leg, target: RoutingTarget, now: float) -> None:
        request = state.request
        leg = EngineLeg(
            state.number, kind, len(request.tokens), state.left, request.block_hashes, queued_s=now
        )
        state.leg, state.at = leg, target.worker_id
        self.fleet.workers[target.worker_id].legs[request.request_id] = request.request_id
        self._submit(target.worker_id, leg, now)

    # -- the queue -----------------------------------------------------------------------------------

    def run_queue(self, now: float) -> None:
        """Start queued requests in order, while there is room."""
        if not self.admission.due(now):
            return
        while (ticket := self.admission.next(now)) is not None:
            state = self.states[ticket.request_id]
            plan, served = self._fitting(state, now)
            if plan is not None:
                self._start(state, plan, now)
            elif not served:
                self.admission.park(ticket)

    def _unpark(self, now: float) -> None:
        for ticket in self.admission.unpark(now):
            state = self.states[ticket.request_id]
            plan = self._plan(state, now)
            if plan is None:
                self.admission.park(ticket)
            else:
                self._start(state, plan, now)

    def tick(self, now: float) -> None:
        """What is due without an event."""
        self._index_tick(now)
        self.admission.tick(now)
        self.run_queue(now)

    def _index_tick(self, now: float) -> None:
        for effect in self.index.tick(now):
            if isinstance(effect, FetchSnapshot):
                part = KvSnapshotPart(_EPOCH, self._sequences[effect.worker_id], b"", last=True)
                self.index.snapshot_part(effect.worker_id, effect.attempt, part, now)
                self.index.snapshot_ended(effect.worker_id, effect.attempt, None, now)

    # -- what workers report ---------------------------------------------------------------------------

    def stored(self, worker_id: str, log: bytes, now: float) -> None:
        """The worker's cache has changed."""
        self._sequences[worker_id] += 1
        self.index.apply(worker_id, KvBatch(_EPOCH, self._sequences[worker_id], log), now)

    def report(self, worker_id: str, load: EngineLoad, now: float) -> None:
        """The worker reports its load, after all that happened in the same step."""
        self.fleet.report(worker_id, load)
        self.admission.tick(now)
        self.run_queue(now)

    def computed(self, worker_id: str, leg: EngineLeg, now: float) -> None:
        """A leg's prompt is complete."""
        state = self.states.get(str(leg.number))
        if state is None or state.leg is not leg:
            return
        target = RoutingTarget(worker_id)
        request_id = state.request.request_id
        self.fleet.confirm(request_id, target, now)
        if leg.leg is not Leg.DECODE and not state.generated:
            state.cached = leg.cached_tokens
            self._times.cached[leg.number] = leg.cached_tokens
            self._times.predicted += leg.cached_tokens == state.placed.predicted_cached_tokens
        if leg.leg is Leg.PREFILL:
            return
        charged = state.charges.get(target, TargetLoad())
        self.fleet.settle(state.charges, target, charged.prompt())
        if state.lease is not None:
            self._let_go(state.held_at, state.lease, now)
            state.lease = None
        self._times.first(leg.number, leg.first_s - state.request.arrival_s)
        self.admission.first_token(state.ticket, None if state.attempts else now - state.started_s)
        self.fleet.health.succeeded(worker_id, now, state.slowness(now))

    def ended(self, worker_id: str, leg: EngineLeg, now: float) -> None:
        """A leg has ended."""
        state = self.states.get(str(leg.number))
        if state is None or state.leg is not leg:
            return
        request_id, target = state.request.request_id, RoutingTarget(worker_id)
        fleet = self.fleet
        usage = usage_of(leg, self._block)
        source = state.placed.prefill if leg.leg is Leg.DECODE else None
        fleet.measured(target, usage, timings_of(leg), state.charges, source)
        fleet.workers[worker_id].legs.pop(request_id, None)
        if leg.leg is Leg.PREFILL:
            self.admission.computed(state.ticket)
            self._hand_over(state, target, leg, now)
            return
        self._discharge(state)
        self.admission.ended(state.ticket)
        del self.states[request_id]
        self._times.end(state.number, leg.finished_s - state.request.arrival_s)
        first_s = state.request.arrival_s + self._times.ttft_s[state.number]
        self.demand.ended(
            RequestSummary(
                request_id,
                SIM_MODEL,
                "ok",
                state.request.arrival_s,
                leg.finished_s,
                first_token_s=first_s,
                usage=replace(usage, cached_tokens=state.cached, output_tokens=state.output_tokens),
                slo=state.request.slo,
            )
        )

    def _hand_over(self, state: SimulatedRequest, target: RoutingTarget, leg: EngineLeg, now: float) -> None:
        charged = state.charges.get(target)
        if charged is not None:
            self.fleet.settle(state.charges, target, charged.copy())
        state.lease, state.held_at = leg, target.worker_id
        decode = state.placed.decode
        if decode.worker_id in self.fleet.workers:
            self._send(state, Leg.DECODE, decode, now)
        else:
            self._again(state, leg, now)

    # -- failover ------------------------------------------------------------------------------------

    def _again(self, state: SimulatedRequest, leg: EngineLeg, now: float) -> None:
        """Place a request again, whose leg is lost: its output so far becomes part of the prompt."""
        self.counters.failovers += 1
        state.attempts += 1
        if state.lease is not None:
            self._let_go(state.held_at, state.lease, now)
            state.lease = None
        if leg.leg is not Leg.PREFILL:
            state.generated = min(state.output_tokens - 1, state.generated + int(leg.generated))
            prompt = self._setting.workload.requests[state.number].prompt_tokens + state.generated
            state.request = replace(state.request, tokens=tokens_of(prompt))
        self._discharge(state)
        state.leg, state.at = None, ""
        plan = self._plan(state, now)
        if plan is None:
            self.admission.park(state.ticket)
        else:
            self._start(state, plan, now)

    def _discharge(self, state: SimulatedRequest) -> None:
        self.fleet.abandon(state.request.request_id)
        for target, work in list(state.charges.items()):
            self.fleet.settle(state.charges, target, work.copy())


def _priors(pools: Sequence[SimulatedPool]) -> Callable[[WorkerIdentity], CostRates]:
    """Return what the router knows of workers before the first measurement: what a profile has measured, as
    in production, else what their data sheets say."""
    replicas = {pool.name: pool.replica for pool in pools}

    def priors(identity: WorkerIdentity) -> CostRates:
        replica = replicas[identity.pool]
        coefficients, links = replica.model.coefficients, replica.links
        if coefficients.source == DATA_SHEET.source:
            return rates_of(identity)
        rates = rates_of(identity, coefficients)
        return rates._replace(transfer_fixed_s=links.fixed_s, transfer_byte_s=links.byte_s)

    return priors
