"""The worker's end of sessions: which router owns which request, across connections.

The engine's step batches are split by owner and kept in each session's bounded tail until its router has
acknowledged them. A broken connection has no effect within the resume window. A router that does not
reconnect, or does not read, loses its session: its requests are aborted and its leases released, without
effect on other sessions.

Changes of the engine's prefix cache are sent to every session, with the batch of their step if there is one.
Routers can recover them by a snapshot, so they are never the reason why a slow session is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Container, Sequence
from dataclasses import dataclass, field, replace

from kvasir.core.errors import ProtocolError
from kvasir.core.identity import PROTOCOL_VERSION, WorkerIdentity
from kvasir.core.kv import KvBatch, KvSnapshotPart
from kvasir.core.locality import NOWHERE, Locality
from kvasir.core.messages import (
    Abort,
    Goodbye,
    Hello,
    LoadAdapter,
    ReleaseLeases,
    RouterMessage,
    SetDraining,
    Submit,
    UnloadAdapter,
    Welcome,
    WorkerFrame,
    WorkerMessage,
)
from kvasir.core.requests import Delta, EngineRequest, KvHandoff, StepBatch
from kvasir.core.session_link import LinkLimits, payload_bytes
from kvasir.core.values import changed
from kvasir.ports.clock import Clock
from kvasir.ports.engine import Engine
from kvasir.ports.session import ConnectionLost, WorkerConnection
from kvasir.wire.pump import SessionPump
from kvasir_workers.adapters.host import AdapterHost
from kvasir_workers.server.adapter_orders import AdapterOrders
from kvasir_workers.server.kv_feed import KvFeed
from kvasir_workers.server.refusals import WORKER_DRAINING, WORKER_OVERLOADED, DrainState, refusal
from kvasir_workers.server.reports import report
from kvasir_workers.server.session import RouterSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionHostLimits:
    """Bounds of one worker's sessions. The tail (`link`) is for each session."""

    link: LinkLimits = field(default_factory=LinkLimits)
    resume_window_s: float = 10.0
    max_sessions: int = 64
    max_live_requests: int = 8192
    """Live legs per session; more are refused with `worker_overloaded`."""
    load_interval_s: float = 0.25
    """Interval at which changes of the load are reported to a router whose deltas do not carry them."""
    heartbeat_s: float = 0.5
    """The longest time without a message or heartbeat to a connected router."""
    max_snapshots: int = 8
    """Concurrent snapshots."""
    drain_poll_s: float = 0.02


class SessionHost:
    """All sessions of one worker. Methods are called on the engine's event loop.

    `deliver` is the engine's sink. Two routers may use the same request id: inside the worker each live leg
    has a unique id, which is the router's if that is free.
    """

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        clock: Clock,
        limits: SessionHostLimits | None = None,
        adapters: AdapterHost | None = None,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._clock = clock
        self._limits = limits or SessionHostLimits()
        self._sessions: dict[str, RouterSession] = {}
        # Engine's id -> (owner, router's id), until the leg's last delta, even if the owner has ended: the
        # last deltas of an aborted leg must not reach another session that reuses the id.
        self._owners: dict[str, tuple[RouterSession, str]] = {}
        self._opened = 0
        self._drain = DrainState()
        self._closed = False
        self._adapters = AdapterOrders(adapters, self._push, self._tell)
        self._kv = KvFeed(engine.kv, self._broadcast, max_snapshots=self._limits.max_snapshots)

    @classmethod
    async def start(
        cls,
        engine: Engine,
        *,
        worker_id: str,
        epoch: int,
        clock: Clock,
        limits: SessionHostLimits | None = None,
        locality: Locality = NOWHERE,
        adapters: AdapterHost | None = None,
    ) -> SessionHost:
        """Start the engine, at `locality`, with its sessions. Raise ConfigError if it cannot start."""
        hosts: list[SessionHost] = []

        def sink(batch: StepBatch) -> None:
            for host in hosts:
                host.deliver(batch)

        identity = await engine.start(sink, worker_id=worker_id, epoch=epoch)
        identity = replace(identity, locality=locality)
        hosts.append(cls(engine, identity, clock, limits, adapters))
        return hosts[0]

    @property
    def identity(self) -> WorkerIdentity:
        """The identity in every Welcome."""
        return self._identity

    @property
    def sessions(self) -> int:
        """Number of sessions, connected or within their resume window."""
        return len(self._sessions)

    @property
    def live_requests(self) -> int:
        """Number of legs whose last delta the engine has not delivered."""
        return len(self._owners)

    @property
    def held_leases(self) -> int:
        """Number of leases of open sessions that were not released and may not have ended."""
        return sum(len(session.leases) for session in self._sessions.values())

    def deliver(self, batch: StepBatch) -> None:
        """Send what one engine step produced."""
        parts: dict[RouterSession, list[Delta]] = {}
        for delta in batch.deltas:
            owner = self._owners.get(delta.request_id)
            if owner is None:
                continue
            session, request_id = owner
            if delta.handoff is not None:
                self._hold(session, delta.handoff)
            if delta.last:
                self._finish(session, request_id, delta)
            if request_id != delta.request_id:
                delta = changed(delta, request_id=request_id)  # noqa: PLW2901 - the router's own name
            parts.setdefault(session, []).append(delta)
        kv, load = self._kv.take(), batch.load
        if load is not None and (load.tiers or load.gpus):
            # Load changes would double the cost of a step; `report` sends them a few times a second.
            load = changed(load, tiers=(), gpus=())
        for session, deltas in parts.items():
            session.load = load or session.load
            self._push(session, StepBatch(tuple(deltas), load, session.defer_if_slow(kv)))
        if kv is not None:
            self._broadcast(kv, beside=parts)

    def snapshot(self) -> AsyncGenerator[KvSnapshotPart, None]:
        """Return all that the engine holds; see KvFeed.snapshot."""
        return self._kv.snapshot()

    async def serve(self, connection: WorkerConnection) -> None:
        """Carry a session over this connection, and return when either has ended."""
        admitted = self._admit(connection.hello)
        if isinstance(admitted, str):
            await connection.refuse(admitted)
            return
        session, resumed = admitted
        welcome = Welcome(session.session_id, resumed, session.link.received_seq, self._identity)
        pump = self._attach(session, connection)
        reporter: asyncio.Task[None] | None = None
        try:
            await connection.accept(welcome)
            reporter = asyncio.ensure_future(self._report(session))
            await pump.run()
        except ConnectionLost as error:
            log.info("session %s: connection lost: %s", session.session_id, error)
        except ProtocolError as error:
            self._end(session, error.message)
        finally:
            if reporter is not None:
                reporter.cancel()
            self._detach(session, pump)
            await connection.close()

    async def drain(self, reason: str, grace_s: float) -> bool:
        """Send routers a drain, refuse further legs, and wait until every stream has ended and its end was
        acknowledged. Return False if `grace_s` was not enough. Sessions remain until `close`."""
        self._tell(self._drain.stop(reason, grace_s))
        deadline = self._clock.now() + grace_s
        while not (quiet := self._quiet()) and self._clock.now() < deadline:
            await self._clock.sleep(self._limits.drain_poll_s)
        return quiet

    async def close(self) -> None:
        """End every session, abort its requests, and refuse further connections. Idempotent."""
        self._closed = True
        self._kv.close()
        for session in list(self._sessions.values()):
            self._end(session, "the worker is stopping")
        await self._adapters.close()

    def _tell(self, message: WorkerMessage) -> None:
        for session in list(self._sessions.values()):
            self._push(session, message)

    def _broadcast(self, kv: KvBatch, beside: Container[RouterSession] = ()) -> None:
        alone = StepBatch(kv=kv)
        for session in list(self._sessions.values()):
            if session not in beside and session.defer_if_slow(kv) is not None:
                self._push(session, alone)

    def _quiet(self) -> bool:
        return not self._owners and all(s.link.unacknowledged == 0 for s in self._sessions.values())

    def _admit(self, hello: Hello) -> tuple[RouterSession, bool] | str:
        """Return the session for this connection and whether it is resumed, or why there is none."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"protocol_version: {hello.protocol_version} != {PROTOCOL_VERSION} (worker)"
        if self._closed:
            return "the worker is stopping"
        session = self._sessions.get(hello.session_id)
        if session is not None and session.router_id == hello.router_id and self._resume(session, hello):
            return session, True
        for earlier in [s for s in self._sessions.values() if s.router_id == hello.router_id]:
            self._end(earlier, "its router opened a new session")
        if len(self._sessions) >= self._limits.max_sessions:
            return f"the worker has reached its limit of {self._limits.max_sessions} sessions"
        return self._open(hello.router_id), False

    def _open(self, router_id: str) -> RouterSession:
        self._opened += 1
        session_id = f"{self._identity.worker_id}/{self._identity.epoch}/{self._opened}"
        session = RouterSession(session_id, router_id, self._limits.link)
        self._sessions[session_id] = session
        if self._drain.message is not None:
            self._push(session, self._drain.message)
        self._adapters.greet(session)
        return session

    def _resume(self, session: RouterSession, hello: Hello) -> bool:
        # The router may reconnect before this side has detected the break.
        if session.pump is not None:
            session.pump.stop()
        try:
            session.link.resume(hello.received_seq)
        except ProtocolError as error:
            self._end(session, error.message)
            return False
        return True

    def _attach(
        self, session: RouterSession, connection: WorkerConnection
    ) -> SessionPump[WorkerMessage, RouterMessage, WorkerFrame]:
        if session.window is not None:
            session.window.cancel()
            session.window = None

        def process(message: RouterMessage) -> None:
            self._process(session, message)

        session.pump = SessionPump(
            connection,
            session.link,
            frame=WorkerFrame,
            process=process,
            clock=self._clock,
        )
        return session.pump

    def _detach(
        self, session: RouterSession, pump: SessionPump[WorkerMessage, RouterMessage, WorkerFrame]
    ) -> None:
        if session.pump is pump:
            session.pump = None
            if not session.ended:
                session.window = asyncio.ensure_future(self._expire(session))

    async def _expire(self, session: RouterSession) -> None:
        await self._clock.sleep(self._limits.resume_window_s)
        session.window = None
        self._end(session, f"not resumed within {self._limits.resume_window_s:g} s")

    def _end(self, session: RouterSession, reason: str) -> None:
        self._leave(session, reason)
        self._free(session)

    def _leave(self, session: RouterSession, reason: str) -> None:
        """Detach the session from requests and connections. Idempotent."""
        if session.ended:
            return
        session.ended = True
        del self._sessions[session.session_id]
        log.info("session %s of %s ended: %s", session.session_id, session.router_id, reason)
        if session.window is not None:
            session.window.cancel()
            session.window = None
        if session.pump is not None:
            session.pump.stop()

    def _free(self, session: RouterSession) -> None:
        leases, session.leases = list(session.leases), {}
        if session.live:
            self._engine.abort(list(session.live.values()))
        if leases:
            self._engine.release(leases)

    def _push(self, session: RouterSession, message: WorkerMessage) -> None:
        if session.ended:
            return
        session.said_s = self._clock.now()
        try:
            session.link.push(message, payload_bytes(message))
        except ProtocolError as error:
            self._leave(session, error.message)
            # Deferred: this may be called by the engine, which must not be called from its own call.
            asyncio.get_running_loop().call_soon(self._free, session)
        if session.pump is not None:
            session.pump.wake()

    def _beat(self, session: RouterSession) -> None:
        session.beat_s = self._clock.now()
        if session.pump is not None:
            session.pump.beat()

    async def _report(self, session: RouterSession) -> None:
        limits = self._limits
        await report(
            session,
            self._engine.load,
            self._push,
            self._beat,
            self._clock,
            interval_s=limits.load_interval_s,
            heartbeat_s=limits.heartbeat_s,
        )

    def _process(self, session: RouterSession, message: RouterMessage) -> None:
        match message:
            case Submit(requests=requests):
                self._submit(session, requests)
            case Abort(request_ids=ids):
                if live := [session.live[one] for one in ids if one in session.live]:
                    self._engine.abort(live)
            case ReleaseLeases(lease_ids=ids):
                if owned := [one for one in ids if session.leases.pop(one, None) is not None]:
                    self._engine.release(owned)
            case SetDraining():
                if (notice := self._drain.ask(message)) is not None:
                    log.info("%s of %s: %s", session.session_id, session.router_id, notice)
                    self._tell(notice)
            case LoadAdapter() | UnloadAdapter():
                self._adapters.take(session, message)
            case Goodbye():
                self._end(session, "its router closed it")

    def _submit(self, session: RouterSession, requests: Sequence[EngineRequest]) -> None:
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids) or not session.live.keys().isdisjoint(ids):
            raise ProtocolError("a submitted request_id is live already")
        accepted: list[EngineRequest] = []
        refused: list[Delta] = []
        for request in requests:
            if self._drain.message is not None:
                refused.append(refusal(request, WORKER_DRAINING, self._drain.message.reason))
            elif len(session.live) >= self._limits.max_live_requests:
                refused.append(refusal(request, WORKER_OVERLOADED, "too many live requests"))
            else:
                accepted.append(self._own(session, request))
        if refused:
            self._push(session, StepBatch(tuple(refused)))
        if accepted:
            self._engine.submit(accepted)

    def _own(self, session: RouterSession, request: EngineRequest) -> EngineRequest:
        request_id = request.request_id
        engine_id = request_id
        while engine_id in self._owners:
            engine_id = f"{session.session_id}/{engine_id}"
        self._owners[engine_id] = (session, request_id)
        session.live[request_id] = engine_id
        return request if engine_id == request_id else changed(request, request_id=engine_id)

    def _finish(self, session: RouterSession, request_id: str, last: Delta) -> None:
        del self._owners[last.request_id]
        session.live.pop(request_id, None)

    def _hold(self, session: RouterSession, handoff: KvHandoff) -> None:
        if session.ended:
            # Deferred: this is called by the engine.
            asyncio.get_running_loop().call_soon(self._engine.release, [handoff.lease_id])
            return
        session.hold(handoff, self._clock.now())
