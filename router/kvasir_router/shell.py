"""The asynchronous shell of a router: feeds session messages and time to the request machine, and performs
its effects.

All decisions are the machine's. The shell passes events in, and messages and deltas out, on one event loop,
so that nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvasir.core.errors import CapacityError, KvasirError, UpstreamError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.messages import EncodedStep, RouterMessage
from kvasir.core.requests import Delta, EngineRequest, FinishReason, Request, Role, StepBatch
from kvasir.ports.clock import Clock
from kvasir.ports.discovery import Discovery
from kvasir.ports.router import (
    RequestSummary,
    StreamSink,
    WorkerView,
)
from kvasir_router.adapters.control import AdapterControl, AdapterWorkers
from kvasir_router.adapters.placement import AdapterWorker
from kvasir_router.fast_path import FastPath
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.registry import DRAINING, READY, Registry
from kvasir_router.index import CancelSnapshot, FetchSnapshot
from kvasir_router.machine_views import SansIoMachine
from kvasir_router.recordings.recorder import Recordings
from kvasir_router.requests.events import (
    AbortOn,
    AdaptersChanged,
    ClientGone,
    Effect,
    EmitDelta,
    Event,
    FailRequest,
    FinishRequest,
    PlanReceived,
    ReleaseOn,
    RequestArrived,
    RequestCancelled,
    ShuttingDown,
    SnapshotEnded,
    StepReceived,
    SubmitTo,
    TimerTick,
)
from kvasir_router.sessions.members import MakeSession, SessionMembers
from kvasir_router.sessions.snapshots import Snapshots
from kvasir_router.tasks import RouterTasks, first_of
from kvasir_router.views import RouterViews

log = logging.getLogger(__name__)

SHOW_INTERVAL_S = 0.25
STOP_GRACE_S = 0.5
GRAIN_S = 1e-6


def unobserved(_value: object) -> None:
    """An observer that does nothing."""


class Router(RouterViews):
    """`kvasir.ports.router.RouterPort`. Call everything on one event loop; `run` must be running.

    `scales_to_zero`: the model may have no worker; requests start one if the planner reports so. `decisions`
    is the log that the machine's fleet writes, `recordings` are those of all routers of the process.
    `adapters` loads those of the model, None: there are none. `fast_path` sends plain deltas without the
    machine; None sends each delta through it. `on_summary` is called for each request that ended, `on_worker`
    for each change of a worker's state and for its load a few times a second; both must not block or raise.
    The caller closes `discovery`.
    """

    def __init__(
        self,
        machine: SansIoMachine,
        registry: Registry,
        discovery: Discovery,
        make_session: MakeSession,
        clock: Clock,
        *,
        decisions: DecisionLog,
        recordings: Recordings,
        fast_path: FastPath | None = None,
        scales_to_zero: bool = False,
        adapters: AdapterControl | None = None,
        rates_from: Callable[[WorkerIdentity], str] = lambda _: "",
        on_summary: Callable[[RequestSummary], None] = unobserved,
        on_worker: Callable[[WorkerView], None] | None = None,
    ) -> None:
        super().__init__(
            machine,
            registry,
            clock,
            decisions=decisions,
            adapters=adapters,
            scales_to_zero=scales_to_zero,
            rates_from=rates_from,
        )
        self._discovery = discovery
        self.recordings = recordings
        self._tasks = RouterTasks()
        spawn = self._tasks.spawn
        self._fast_path = fast_path
        self._on_summary = on_summary
        self._on_worker = on_worker
        if adapters is not None:
            adapters.attach(AdapterWorkers(self._adapter_workers, self._order, self._adapters_changed, spawn))
        self._members = SessionMembers(
            registry,
            make_session,
            feed=self._feed,
            rest=self._rest,
            busy=self._busy,
            changed=self._show,
            adapters=self.adapters,
            spawn=spawn,
        )
        self._snapshots = Snapshots(clock, feed=self._feed, spawn=spawn)
        self._sinks: dict[str, StreamSink] = {}
        self._to_flush: set[str] = set()
        self._turn_ends = False
        self._shown_s: dict[str, float] = {}
        self._armed_for: float | None = None
        self._rearm = asyncio.Event()
        self._quiet = asyncio.Event()
        self._closed = asyncio.Event()

    # -- RouterPort ------------------------------------------------------------------------------

    def submit(self, request: Request, sink: StreamSink) -> None:
        """See RouterPort. Also raises RequestError (`duplicate_request`, `worker_not_found`)."""
        if request.worker:
            self._members.check_known(request.worker)
        self._demand.arrived(request)
        try:
            effects = self._machine.handle(RequestArrived(request), self._clock.now())
        except CapacityError as error:
            self._demand.refused()
            if self.recordings.active:
                self.recordings.refused(request, error.code, self._machine.fleet.blocks)
            raise
        self._sinks[request.request_id] = sink
        if self.recordings.active:
            self.recordings.arrived(request)
        self._after_turn()
        self._perform(effects)

    def cancel(self, request_id: str) -> None:
        """See RouterPort."""
        self._cut(request_id, "client_closed")

    def drain(self, worker_id: str, draining: bool, reason: str = "") -> None:
        """See RouterPort."""
        self._members.ask_drain(worker_id, draining, reason)

    def planned(self, roles: Mapping[str, Role], ready_in_s: Mapping[str, float] | None) -> None:
        """The planner's report; see PlannerWord. None for the latter if the planner does not answer."""
        awake = None if ready_in_s is None else ready_in_s.get(self._registry.model)
        self._awake_in_s = awake
        self._feed(PlanReceived(roles, awake))

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `close`. Raise the error that ended a part of the router, after closing the rest."""
        if self._closing:
            return
        self._tasks.spawn(self._watch(), "router-watch")
        self._tasks.spawn(self._tick(), "router-tick")
        try:
            await first_of(self._tasks.failed.wait(), self._closed.wait())
        finally:
            await self.close()
        if self._tasks.failure is not None:
            raise self._tasks.failure

    async def close(self) -> None:
        """End every request with `shutting_down`, wait briefly for workers to confirm, and end all sessions.
        Idempotent."""
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._feed(ShuttingDown())
        self._flush()
        if self._unconfirmed():
            self._quiet.clear()
            await first_of(self._quiet.wait(), self._clock.sleep(STOP_GRACE_S))
        await self._members.close()
        await self._tasks.cancel()
        self._closed.set()

    def validate_state(self) -> None:
        """Raise AssertionError unless machine and shell agree and every invariant holds."""
        self._machine.validate_state()
        if len(self._sinks) != self._machine.in_flight:
            raise AssertionError(f"{len(self._sinks)} sinks, {self._machine.in_flight} requests")

    async def _watch(self) -> None:
        async for snapshot in self._discovery.watch():
            self._members.update(snapshot)

    async def _tick(self) -> None:
        while True:
            now = self._clock.now()
            due = self._machine.next_wakeup()
            if due is not None and due <= now:
                self._feed(TimerTick())
                # Bulk work runs in slices, so that other work gets its turn.
                await self._clock.sleep(0)
                continue
            self._armed_for = due
            self._rearm.clear()
            if due is None:
                await self._rearm.wait()
            else:
                # Clocks have a resolution: a wait below it would end early, again and again.
                await first_of(self._rearm.wait(), self._clock.sleep(max(due - now, GRAIN_S)))

    def _arm(self) -> None:
        due = self._machine.next_wakeup()
        if due is not None and (self._armed_for is None or due < self._armed_for):
            self._rearm.set()

    # -- the machine -----------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        effects = self._machine.handle(event, self._clock.now())
        self._after_turn()
        self._perform(effects)
        if isinstance(event, SnapshotEnded):
            self._show(event.worker_id)
        elif isinstance(event, StepReceived):
            if event.batch.load is not None and self._on_worker is not None:
                self._show_load(event.worker_id)
            if self._closing and not self._unconfirmed():
                self._quiet.set()

    def _rest(self, worker_id: str, step: EncodedStep) -> StepBatch | None:
        if self._fast_path is None:
            return step.decode(None)
        return self._fast_path.rest(worker_id, step, self._clock.now())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, EmitDelta):
                self._emit(effect)
            elif isinstance(effect, SubmitTo | AbortOn | ReleaseOn):
                self._address(effect)
            elif isinstance(effect, FetchSnapshot | CancelSnapshot):
                self._fetch(effect)
            else:
                self._end(effect)

    def _emit(self, effect: EmitDelta) -> None:
        sink = self._sinks.get(effect.request_id)
        if sink is None:
            return
        try:
            sink.on_delta(effect.delta)
            if self._fast_path is not None:
                self._fast_path.offer(effect.request_id, effect.delta, sink)
        except Exception:  # An error of one client's sink must not end the session that serves the others.
            log.exception("the sink of request %s failed", effect.request_id)
            self._cut(effect.request_id, "internal_error")

    def _end(self, effect: FinishRequest | FailRequest | ClientGone) -> None:
        sink = self._sinks.pop(effect.request_id, None)
        if self._fast_path is not None:
            self._fast_path.close(effect.request_id)
        # Before the client is told of the end: it may ask for the decision record at once.
        decision = self._decisions.ended(effect.summary)
        if self.recordings.active:
            self.recordings.ended(effect.summary, decision, self._machine.fleet.blocks)
        try:
            if sink is not None and isinstance(effect, FinishRequest):
                sink.on_finish(effect.summary)
            elif sink is not None and isinstance(effect, FailRequest):
                sink.on_error(effect.error, effect.summary)
        except Exception:  # as for a delta
            log.exception("the sink of request %s failed at its end", effect.request_id)
        self._demand.ended(effect.summary)
        self._on_summary(effect.summary)

    def _cut(self, request_id: str, outcome: str) -> None:
        self._sinks.pop(request_id, None)
        self._feed(RequestCancelled(request_id, outcome))

    def _address(self, effect: SubmitTo | AbortOn | ReleaseOn) -> None:
        member = self._members.get(effect.worker_id)
        if member is None:
            return
        match effect:
            case SubmitTo(_, request):
                member.outbox.submit(request)
            case AbortOn(_, leg_ids):
                member.outbox.abort(leg_ids)
            case ReleaseOn(_, lease_ids):
                member.outbox.release(lease_ids)
        self._to_flush.add(effect.worker_id)

    def _fetch(self, effect: FetchSnapshot | CancelSnapshot) -> None:
        member = self._members.get(effect.worker_id)
        if isinstance(effect, FetchSnapshot) and member is not None:
            self._snapshots.fetch(effect, member.session)
        else:
            self._snapshots.cancel(effect.worker_id)

    def _after_turn(self) -> None:
        """Run the consequences of an event loop iteration once at its end, however many events it had."""
        if not self._turn_ends:
            self._turn_ends = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_ends = False
        self._flush()
        self._arm()

    def _flush(self) -> None:
        to_flush, self._to_flush = sorted(self._to_flush), set()
        for worker_id in to_flush:
            member = self._members.get(worker_id)
            if member is None:
                continue
            for request, error in member.outbox.flush(member.session.send):
                self._refuse(worker_id, request, error)
            self._members.settle(worker_id)

    def _refuse(self, worker_id: str, request: EngineRequest, error: KvasirError) -> None:
        """End a leg that could not be sent as if the worker had refused it."""
        delta = Delta(
            request.request_id,
            0,
            finish=FinishReason.ERROR,
            last=True,
            error=error.code,
            error_message=error.message,
        )
        self._feed(StepReceived(worker_id, StepBatch((delta,))))

    # -- adapters --------------------------------------------------------------------------------

    def _adapter_workers(self) -> list[AdapterWorker]:
        return [
            AdapterWorker(
                known.endpoint.worker_id,
                known.endpoint.pool,
                ready=known.state == READY,
                connected=known.state in (READY, DRAINING),
            )
            for known in self._registry.all()
        ]

    def _order(self, worker_id: str, message: RouterMessage) -> None:
        member = self._members.get(worker_id)
        if member is None:
            raise UpstreamError(f"worker {worker_id} has left", code="worker_lost")
        member.session.send(message)

    def _adapters_changed(self, worker_id: str, keys: frozenset[str]) -> None:
        self._feed(AdaptersChanged(worker_id, keys))
        self._show(worker_id)

    def _show(self, worker_id: str) -> None:
        if self._on_worker is None:
            return
        if self._members.get(worker_id) is None:
            self._shown_s.pop(worker_id, None)
        else:
            self._shown_s[worker_id] = self._clock.now()
            self._on_worker(self._view(worker_id))

    def _show_load(self, worker_id: str) -> None:
        if self._clock.now() - self._shown_s.get(worker_id, 0.0) >= SHOW_INTERVAL_S:
            self._show(worker_id)
