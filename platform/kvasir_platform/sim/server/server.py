"""A whole server in virtual time: arrivals, workers that come and go, messages, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise

from kvasir.core.requests import EngineLoad, Leg
from kvasir.ports.scaler import ReplicaState
from kvasir_platform.sim.engine.batch_engine import BatchEngine
from kvasir_platform.sim.engine.sequence import EngineEvents, EngineLeg
from kvasir_platform.sim.engine.step_costs import StepCosts
from kvasir_platform.sim.replay.cache import BlockCache
from kvasir_platform.sim.server.results import RequestTimes, ServerResult, WorkerResult
from kvasir_platform.sim.server.router import SimulatedRouter
from kvasir_platform.sim.server.setting import (
    LIMITS,
    FleetFault,
    FleetFaultKind,
    RunLimits,
    ServerSetting,
    SimulatedPool,
)
from kvasir_platform.sim.server.timeline import Timeline, TimelineSample, TransferMark, WorkerSample

_TICK_S = 0.25
_FRAMES = 480
_STATES = {ReplicaState.STARTING: "w", ReplicaState.SERVING: "s", ReplicaState.LEAVING: "d"}


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One worker: its engine, and for how long it has existed. `version` makes earlier wake-ups void."""

    worker_id: str
    pool: SimulatedPool
    engine: BatchEngine
    since_s: float
    state: ReplicaState
    changed_s: float
    version: int = 0
    ended_s: float | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class _WorkerMessage:
    worker: SimulatedWorker
    happened: EngineEvents
    log: bytes
    load: EngineLoad


class ServerSimulation:
    """One run. `clock` reads real seconds, for the speed that the result reports; `tell` gets the share of
    requests that have ended, now and then. `every_s` calls in virtual time are made through `periodic`."""

    def __init__(
        self,
        setting: ServerSetting,
        *,
        clock: Callable[[], float],
        tell: Callable[[float], None] = lambda _share: None,
        limits: RunLimits = LIMITS,
    ) -> None:
        self.setting = setting
        self.now = 0.0
        self.workers: dict[str, SimulatedWorker] = {}
        self.past: list[SimulatedWorker] = []
        self.timeline: Timeline | None = None
        if setting.frames:
            span = max(1.0, setting.workload.duration_s)
            self.timeline = Timeline(setting.frames, span / setting.frames)
        self._clock, self._tell, self._limits = clock, tell, limits
        self._times = RequestTimes(setting.workload, setting.slo)
        blocks = sum(
            (pool.replica.memory.blocks + pool.replica.memory.cpu_blocks) * max(1, pool.replicas)
            for pool in setting.pools
        )
        self.router = SimulatedRouter(setting, self._times, self._submit, self._let_go, blocks)
        self._costs = {
            pool.name: StepCosts(pool.replica.model, pool.replica.options) for pool in setting.pools
        }
        self._parents: dict[int, int] = {}
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order, self._names = count(), count()
        self._next = 0
        for pool in setting.pools:
            for _ in range(pool.replicas):
                self._serve(self.make(pool))

    # -- the run -------------------------------------------------------------------------------------

    def run(self) -> ServerResult:
        """Run until every request has ended, or the limits are reached."""
        began = self._clock()
        requests, heap = self.setting.workload.requests, self._heap
        total, times = len(requests), self._times
        self.periodic(_TICK_S, self.router.tick)
        if self.timeline is not None:
            self.periodic(self.timeline.step_s, self._sample)
        for fault in self.setting.faults:
            self.at(fault.at_s, lambda at, fault=fault: self._fault(fault, at))  # type: ignore[misc]
        until = self.setting.workload.duration_s + self._limits.tail_s
        shown = 0
        for _ in range(self._limits.events):
            if times.ended >= total or self.now > until:
                break
            if self._next < total and requests[self._next].arrival_s <= heap[0][0]:
                self._arrive()
            else:
                self.now, _, act = heappop(heap)
                act(self.now)
            if times.ended >= shown + max(1, total // 100):
                shown = times.ended
                self._tell(shown / total)
        if self.timeline is not None:
            self._sample(self.now, last=True)
        return self._result(self._clock() - began)

    def at(self, due: float, act: Callable[[float], None]) -> None:
        """Call `act` at a time."""
        heappush(self._heap, (due, next(self._order), act))

    def periodic(self, every_s: float, act: Callable[[float], None]) -> None:
        """Call `act` again and again."""

        def again(now: float) -> None:
            act(now)
            self.at(now + every_s, again)

        self.at(every_s, again)

    def _arrive(self) -> None:
        number, self._next = self._next, self._next + 1
        request = self.setting.workload.requests[number]
        self.now = request.arrival_s
        names = request.names
        if names:
            self._parents.setdefault(names[0], 0)
            self._parents.update((child, parent) for parent, child in pairwise(names))
        self.router.arrive(number, self.now)

    # -- workers -------------------------------------------------------------------------------------

    def make(self, pool: SimulatedPool) -> SimulatedWorker:
        """Ask for a worker; it serves when `serve` is called."""
        memory = pool.replica.memory
        worker_id = f"{pool.name}-{next(self._names)}"
        cache = BlockCache(memory.blocks, memory.cpu_blocks, self._parents)
        engine = BatchEngine(worker_id, pool.replica, cache, self._costs[pool.name])
        worker = SimulatedWorker(worker_id, pool, engine, self.now, ReplicaState.STARTING, self.now)
        self.workers[worker_id] = worker
        return worker

    def start(self, pool: SimulatedPool) -> None:
        """Ask for a worker that serves when its pool's start has passed."""
        worker = self.make(pool)
        self.router.counters.starts += 1
        self._mark(f"{worker.worker_id} starts")
        self.at(self.now + pool.start_s, lambda _: self._serve(worker))

    def _serve(self, worker: SimulatedWorker) -> None:
        if worker.state is not ReplicaState.STARTING:
            return
        worker.state, worker.changed_s = ReplicaState.SERVING, self.now
        identity = worker.pool.replica.identity(worker.worker_id, worker.pool.name, worker.pool.role)
        self.router.joined(worker.worker_id, identity, self.now)
        if self.now:
            self._mark(f"{worker.worker_id} serves")

    def retire(self, worker: SimulatedWorker) -> None:
        """Drain a worker, or cancel its start."""
        if worker.state is ReplicaState.LEAVING:
            return
        starting = worker.state is ReplicaState.STARTING
        worker.state, worker.changed_s = ReplicaState.LEAVING, self.now
        self._mark(f"{worker.worker_id} drains")
        if starting:
            self._gone(worker)
            return
        self.router.drain(worker.worker_id, "scaling")
        self._leave_if_idle(worker)

    def _leave_if_idle(self, worker: SimulatedWorker) -> None:
        known = self.router.fleet.workers.get(worker.worker_id)
        if worker.state is ReplicaState.LEAVING and (known is None or not known.legs):
            self.router.left(worker.worker_id, self.now)
            self._gone(worker)

    def _gone(self, worker: SimulatedWorker) -> None:
        if self.workers.pop(worker.worker_id, None) is not None:
            worker.ended_s = self.now
            worker.version += 1
            self.past.append(worker)

    # -- faults --------------------------------------------------------------------------------------

    def _fault(self, fault: FleetFault, now: float) -> None:
        serving = [each for each in self.workers.values() if each.state is ReplicaState.SERVING]
        if not serving:
            return
        worker = serving[fault.worker % len(serving)]
        if fault.kind is FleetFaultKind.DRAIN:
            self.retire(worker)
        elif fault.kind is FleetFaultKind.SLOW:
            self._mark(f"{worker.worker_id} becomes {fault.factor:g} times slower")
            worker.engine.slowness = fault.factor
            self.at(now + fault.lasts_s, lambda _: setattr(worker.engine, "slowness", 1.0))
        else:
            self._mark(f"{worker.worker_id} crashes")
            worker.engine.stop(now)
            worker.lost = True
            self._gone(worker)
            self.at(now + self.setting.detect_s, lambda at: self.router.lost(worker.worker_id, at))
            self.at(now + fault.lasts_s, lambda _: self._serve(self.make(worker.pool)))

    # -- legs and messages -----------------------------------------------------------------------------

    def _submit(self, worker_id: str, leg: EngineLeg, now: float) -> None:
        worker = self.workers.get(worker_id)
        if worker is None:
            # It is lost, and the router does not know yet.
            return
        self.at(now + worker.engine.request_s, lambda at: self._reached(worker, leg, at))

    def _reached(self, worker: SimulatedWorker, leg: EngineLeg, now: float) -> None:
        """A leg is prepared for its engine, if that is still there."""
        if self.workers.get(worker.worker_id) is worker:
            leg.queued_s = now
            worker.engine.submit(leg, now)
            self._wake(worker)

    def _let_go(self, worker_id: str, leg: EngineLeg, now: float) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.engine.let_go(leg, now)
            self._wake(worker)
            self._leave_if_idle(worker)

    def _wake(self, worker: SimulatedWorker) -> None:
        """Schedule one event for the next change of a worker; an earlier appointment is void."""
        worker.version += 1
        due = worker.engine.next_event_s
        if due == float("inf"):
            return
        version = worker.version

        def happen(now: float) -> None:
            if worker.version == version:
                self._happened(worker, worker.engine.advance(now), now)

        self.at(max(due, self.now), happen)

    def _happened(self, worker: SimulatedWorker, happened: EngineEvents, now: float) -> None:
        log = worker.engine.cache.take_log()
        if log or happened.computed or happened.ended:
            message = _WorkerMessage(worker, happened, log, worker.engine.load)
            self.at(now + self.setting.report_delay_s, lambda at: self._receive(message, at))
        if self.timeline is not None:
            self._transfers(worker, happened)
        self._wake(worker)

    def _receive(self, message: _WorkerMessage, now: float) -> None:
        """What the router does with a step of a worker."""
        worker_id = message.worker.worker_id
        router = self.router
        if worker_id not in router.fleet.workers:
            return
        if message.log:
            router.stored(worker_id, message.log, now)
        for leg in message.happened.computed:
            router.computed(worker_id, leg, now)
        for leg in message.happened.ended:
            router.ended(worker_id, leg, now)
        if worker_id in router.fleet.workers:
            router.report(worker_id, message.load, now)
        self._leave_if_idle(message.worker)

    # -- what is kept for people -----------------------------------------------------------------------

    def _mark(self, text: str) -> None:
        if self.timeline is not None:
            self.timeline.happened(self.now, text)

    def _transfers(self, worker: SimulatedWorker, happened: EngineEvents) -> None:
        assert self.timeline is not None  # noqa: S101
        for leg in happened.computed:
            if leg.leg is Leg.DECODE and leg.moved_bytes:
                state = self.router.states.get(str(leg.number))
                source = state.held_at if state is not None else ""
                mark = TransferMark(
                    leg.started_s, leg.computed_s, source, worker.worker_id, leg.moved_bytes / 1e6
                )
                self.timeline.moved(mark)

    def _sample(self, now: float, *, last: bool = False) -> None:
        timeline, times = self.timeline, self._times
        if timeline is None:
            return
        every = [*self.workers.values(), *(each for each in self.past if each.lost)]
        shown = {
            each.worker_id: WorkerSample(
                "x" if each.lost else _STATES[each.state],
                each.engine.waiting,
                each.engine.prefilling,
                each.engine.decoding,
                each.engine.cache.usage,
            )
            for each in every
            if timeline.knows(each.worker_id, each.pool.name)
        }
        tokens = sum(each.engine.totals.generated_tokens for each in (*self.workers.values(), *self.past))
        refused = sum(self.router.counters.refused.values())
        queued = len(self.router.admission)
        frame = TimelineSample(
            now, queued, self._next, times.ended - refused, times.met, refused, tokens, shown
        )
        timeline.add(frame, last=last)

    def _result(self, real_s: float) -> ServerResult:
        setting, counters = self.setting, self.router.counters
        workers = []
        for each in sorted([*self.workers.values(), *self.past], key=lambda worker: worker.since_s):
            exists_s = (self.now if each.ended_s is None else each.ended_s) - each.since_s
            price = each.pool.dollars_per_hour
            dollars = None if price is None else price * exists_s / 3600.0
            workers.append(
                WorkerResult(each.worker_id, each.pool.name, exists_s, dollars, each.engine.totals)
            )
        return ServerResult(
            times=self._times,
            workers=tuple(workers),
            slo=setting.slo,
            requests=len(setting.workload.requests),
            span_s=max(setting.workload.duration_s, 1e-9),
            virtual_s=self.now,
            real_s=real_s,
            infinite_hits=setting.workload.infinite_hits(),
            refused=dict(counters.refused),
            failovers=counters.failovers,
            starts=counters.starts,
            decisions=counters.decisions,
        )
