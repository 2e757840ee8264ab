"""The members of the fleet: discovery says which workers should exist, sessions say which are alive.

A worker that discovery no longer reports keeps its streams: it gets no new work, and its session ends after
the last of them. A worker that does not match stays connected and unused, so that it can be accepted once the
worker that it conflicts with is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir.core.errors import RequestError, UpstreamError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.membership import Endpoint
from kvasir.core.membership import MembershipSnapshot as Snapshot
from kvasir.core.messages import (
    AdapterAnswer,
    AdapterReport,
    AdaptersHeld,
    Draining,
    EncodedStep,
    RouterMessage,
    Serving,
    SetDraining,
    WorkerMessage,
)
from kvasir.core.requests import StepBatch
from kvasir_router.fleet.registry import CONNECTING, DRAINING, INTERRUPTED, READY, REFUSED, Registry
from kvasir_router.requests.events import (
    Event,
    StepReceived,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
    WorkerRestored,
)
from kvasir_router.sessions.outbox import Outbox
from kvasir_router.sessions.session import (
    SessionEvent,
    SessionInterrupted,
    SessionLost,
    SessionMessage,
    SessionReady,
    SessionRefused,
    SessionUnreachable,
)

LEFT = "no longer a member"
_NAMED = 32
"""Number of workers that an error lists."""


class MemberSession(Protocol):
    """The interface that members need of kvasir_router.sessions.session.WorkerSession."""

    def send(self, message: RouterMessage) -> None: ...

    def snapshot(self, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]: ...

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class AdapterListener(Protocol):
    """Follows the adapters that workers have loaded at run time."""

    def heard(self, worker_id: str, report: AdapterReport) -> None:
        """A worker reports, accepted or not."""
        ...

    def joined(self, worker_id: str) -> None:
        """A worker was accepted."""
        ...

    def left(self, worker_id: str) -> None:
        """The session of a worker is over."""
        ...


MakeSession = Callable[[Endpoint, Callable[[SessionEvent], None]], MemberSession]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


@dataclass(slots=True)
class SessionMember:
    """One worker's session and its outbox. `left`: discovery has dropped the worker; `draining` is the
    worker's own report."""

    session: MemberSession
    outbox: Outbox = field(default_factory=Outbox)
    left: bool = False
    draining: str = ""


class SessionMembers:
    """Keeps a session with every worker that discovery reports.

    `feed` passes events to the request machine, and `rest` handles the remainder of a worker's step; `busy`
    returns the number of legs on a worker; `changed` is called on every change of a worker's state;
    `adapters` follows those that workers load; `spawn` runs a task whose failure is the router's.
    """

    def __init__(
        self,
        registry: Registry,
        make_session: MakeSession,
        *,
        feed: Callable[[Event], None],
        rest: Callable[[str, EncodedStep], StepBatch | None],
        busy: Callable[[str], int],
        changed: Callable[[str], None],
        adapters: AdapterListener,
        spawn: Spawn,
    ) -> None:
        self.registry = registry
        self._make_session = make_session
        self._feed = feed
        self._rest = rest
        self._busy = busy
        self._changed = changed
        self._adapters = adapters
        self._spawn = spawn
        self._members: dict[str, SessionMember] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def get(self, worker_id: str) -> SessionMember | None:
        """Return a member that discovery reports, or that still has streams."""
        return self._members.get(worker_id)

    def all(self) -> list[tuple[str, SessionMember]]:
        """Return every member with its id."""
        return list(self._members.items())

    def update(self, snapshot: Snapshot) -> None:
        """Apply a snapshot of discovery."""
        named = {endpoint.worker_id: endpoint for endpoint in snapshot.endpoints}
        for worker_id in [worker_id for worker_id in self._members if worker_id not in named]:
            self._leave(worker_id)
        for worker_id, endpoint in sorted(named.items()):
            member = self._members.get(worker_id)
            if member is None:
                self._join(endpoint)
            elif member.left:
                self._return(worker_id, member)

    def check_known(self, worker_id: str) -> None:
        """Raise RequestError for a worker that is no member."""
        if worker_id not in self._members:
            raise no_such_worker(worker_id, self._members)

    def ask_drain(self, worker_id: str, draining: bool, reason: str) -> None:
        """See RouterPort.drain."""
        self.check_known(worker_id)
        try:
            self._members[worker_id].session.send(SetDraining(draining, reason))
        except UpstreamError as error:
            raise UpstreamError(
                f"{worker_id} cannot be reached: {error.message}; try again once `kvasir get workers` does "
                "not show it connecting",
                code=error.code,
            ) from error

    def settle(self, worker_id: str) -> None:
        """Close the session of a worker that left, once none of our requests runs there."""
        member = self._members.get(worker_id)
        if member is not None and member.left and not self._busy(worker_id):
            self._drop(worker_id, member)

    async def close(self) -> None:
        """End every session, without events."""
        for worker_id, member in self.all():
            self._drop(worker_id, member)
        if self._ending:
            await asyncio.wait(self._ending)

    # -- discovery -------------------------------------------------------------------------------

    def _join(self, endpoint: Endpoint) -> None:
        session = self._make_session(endpoint, self._on_event)
        self._members[endpoint.worker_id] = SessionMember(session)
        self.registry.add(endpoint)
        self._spawn(session.run(), f"session-{endpoint.worker_id}")
        self._changed(endpoint.worker_id)

    def _leave(self, worker_id: str) -> None:
        member = self._members[worker_id]
        if member.left:
            return
        member.left = True
        if self.registry[worker_id].serves:
            self._feed(WorkerDraining(worker_id, LEFT))
            self._show(worker_id, member)
        self.settle(worker_id)

    def _return(self, worker_id: str, member: SessionMember) -> None:
        member.left = False
        if not member.draining:
            self._feed(WorkerRestored(worker_id))
        self._show(worker_id, member)

    def _drop(self, worker_id: str, member: SessionMember) -> None:
        del self._members[worker_id]
        self.registry.remove(worker_id)
        task = asyncio.ensure_future(member.session.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._feed(WorkerLost(worker_id, LEFT))
        self._adapters.left(worker_id)
        self._changed(worker_id)
        self._reconsider()

    # -- sessions --------------------------------------------------------------------------------

    def _on_event(self, event: SessionEvent) -> None:
        worker_id = event.worker_id
        member = self._members.get(worker_id)
        if member is None:
            return
        match event:
            case SessionMessage(message=message):
                self._message(worker_id, member, message)
                return
            case SessionReady(identity=identity):
                self._ready(worker_id, member, identity)
            case SessionInterrupted(reason=reason):
                if self.registry[worker_id].serves:
                    self._feed(WorkerInterrupted(worker_id))
                    self.registry.note(worker_id, INTERRUPTED, reason)
            case SessionLost(reason=reason):
                self._lost(worker_id, member, reason)
            case SessionRefused(reason=reason):
                # Without a session it must not be accepted when a peer leaves, so its identity is dropped.
                self.registry.note(worker_id, CONNECTING)
                self.registry.note(worker_id, REFUSED, reason)
            case SessionUnreachable(reason=reason):
                self.registry.note(worker_id, CONNECTING, reason)
        self._changed(worker_id)

    def _message(self, worker_id: str, member: SessionMember, message: WorkerMessage | EncodedStep) -> None:
        serves = self.registry[worker_id].serves
        if isinstance(message, Draining):
            # Kept for a refused worker too: it may be accepted later.
            member.draining = message.reason
            if serves:
                self._feed(WorkerDraining(worker_id, message.reason))
                self._show(worker_id, member)
        elif isinstance(message, Serving):
            member.draining = ""
            if serves and not member.left:
                self._feed(WorkerRestored(worker_id))
            if serves:
                self._show(worker_id, member)
        elif isinstance(message, AdaptersHeld | AdapterAnswer):
            self._adapters.heard(worker_id, message)
        elif serves:
            step = self._rest(worker_id, message) if isinstance(message, EncodedStep) else message
            if step is not None:
                self._feed(StepReceived(worker_id, step))
            if member.left:
                self.settle(worker_id)

    def _ready(self, worker_id: str, member: SessionMember, identity: WorkerIdentity) -> None:
        identity = self.registry.located(worker_id, identity)
        if not self.registry.register(worker_id, identity):
            return
        self._feed(WorkerReady(worker_id, identity))
        self._adapters.joined(worker_id)
        reason = member.draining or (LEFT if member.left else "")
        if reason:
            self._feed(WorkerDraining(worker_id, reason))
            self._show(worker_id, member)

    def _lost(self, worker_id: str, member: SessionMember, reason: str) -> None:
        member.outbox.clear()
        member.draining = ""
        self.registry.note(worker_id, CONNECTING, reason)
        self._feed(WorkerLost(worker_id, reason))
        self._adapters.left(worker_id)
        self._reconsider()
        self.settle(worker_id)

    def _reconsider(self) -> None:
        """A peer is gone: accept workers that were refused because of it."""
        for worker_id, identity in self.registry.refused():
            member = self._members.get(worker_id)
            if member is not None:
                self._ready(worker_id, member, identity)
                self._changed(worker_id)

    def _show(self, worker_id: str, member: SessionMember) -> None:
        known = self.registry[worker_id]
        if known.serves and known.state != INTERRUPTED:
            reason = member.draining or (LEFT if member.left else "")
            self.registry.note(worker_id, DRAINING if reason else READY, reason)
        self._changed(worker_id)


def no_such_worker(worker_id: str, there_are: Iterable[str]) -> RequestError:
    """Return the error for an unknown worker."""
    known = sorted(there_are)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    named = ", ".join(known[:_NAMED]) or "none"
    return RequestError(
        f"There is no worker {worker_id[:256]!r} here; there are: {named}{more}.",
        status=404,
        code="worker_not_found",
    )
