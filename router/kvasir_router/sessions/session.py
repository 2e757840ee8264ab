"""The router's end of a session, which outlives connections and reports when it is lost.

`WorkerSession` dials, resumes and replays. What it cannot recover it reports, so that no request waits for a
worker that has dropped it. Each event goes to the router's shell.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

from kvasir.core.errors import ProtocolError, RequestError, UpstreamError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.membership import Endpoint
from kvasir.core.messages import (
    EncodedStep,
    Goodbye,
    Hello,
    RouterFrame,
    RouterMessage,
    SetDraining,
    Submit,
    Welcome,
    WorkerMessage,
)
from kvasir.core.requests import EngineRequest
from kvasir.core.session_link import LinkLimits, SessionLink, media_bytes, payload_bytes
from kvasir.core.values import value
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.session import ConnectionLost, Dialer, RouterConnection
from kvasir.wire.pump import SessionPump
from kvasir_router.sessions.inactivity import SessionPatience, wait_inactive


@dataclass(frozen=True, slots=True)
class SessionReady:
    """The worker accepts messages. `resumed` False: the session is new and has none of our requests."""

    worker_id: str
    identity: WorkerIdentity
    resumed: bool


@value
class SessionMessage:
    """A message of the worker; each exactly once, in order."""

    worker_id: str
    message: WorkerMessage | EncodedStep


@dataclass(frozen=True, slots=True)
class SessionInterrupted:
    """The connection broke or timed out. The session and its requests go on: Ready or Lost follows."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session is over, with every request that ran in it. A new one is being dialed."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """The worker refused the session. Reported once per reason; dialing continues at the slowest pace."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionUnreachable:
    """The worker does not answer, and there is no session to resume. Reported once per reason in a row."""

    worker_id: str
    reason: str


SessionEvent = (
    SessionReady | SessionMessage | SessionInterrupted | SessionLost | SessionRefused | SessionUnreachable
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of the router's end. `resume_window_s` should not exceed that of the workers, and
    `liveness_timeout_s` should allow for two of their heartbeats. A broken connection is dialed at once, and
    then with a delay between the two back-offs; the dialer bounds the duration of a dial."""

    link: LinkLimits = field(default_factory=LinkLimits)
    resume_window_s: float = 10.0
    liveness_timeout_s: float = 1.5
    """A connection without a message for this long is broken: the worker is frozen or unreachable."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 1.0
    goodbye_s: float = 0.5
    submit_bytes: int = 4 << 20
    """Larger Submits are split, so that one does not delay what follows."""
    request_bytes: int = 32 << 20
    """A single larger request is refused."""


class WorkerSession:
    """One worker's session. All methods are called on one event loop.

    `on_event` is called from `run` only, never from within `send`; it must not block or raise. `router_id`
    must be unique among live routers: a worker keeps one session per router. Sessions of one router share
    their `patience`; without one, `liveness_timeout_s` of the limits applies.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dialer: Dialer,
        *,
        clock: Clock,
        rng: Rng,
        on_event: Callable[[SessionEvent], None],
        router_id: str,
        limits: SessionLimits | None = None,
        patience: SessionPatience | None = None,
    ) -> None:
        self._worker_id = endpoint.worker_id
        self._address = endpoint.address
        self._dialer = dialer
        self._clock = clock
        self._rng = rng
        self._on_event = on_event
        self._router_id = router_id
        self._limits = limits or SessionLimits()
        timeout_s = self._limits.liveness_timeout_s
        self._patience = patience or SessionPatience(timeout_s, timeout_s, clock.now)
        self._session_id = ""
        self._link: SessionLink[RouterMessage] | None = None
        self._doomed = False
        self._pump: SessionPump[RouterMessage, WorkerMessage | EncodedStep, RouterFrame] | None = None
        self._window: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self._failures = 0
        self._refusal: str | None = None

    def send(self, message: RouterMessage) -> None:
        """Queue a message without waiting. While the connection is broken it is kept for the next one.

        Without a session, Submit and SetDraining raise UpstreamError (`session_lost`), and other messages are
        dropped: they refer to things that ended with it. A request that is too large raises RequestError. If
        the tail overflows, the session is lost and the event says so.
        """
        link = None if self._doomed else self._link
        if link is None:
            if isinstance(message, Submit | SetDraining):
                raise UpstreamError(f"no session with {self._worker_id}", code="session_lost")
            return
        parts: list[tuple[RouterMessage, int]]
        if isinstance(message, Submit):
            parts = list(self._split(message))
        else:
            parts = [(message, payload_bytes(message))]
        try:
            for part, size in parts:
                # The tail refers to media, which gateways bound: they must not end a session.
                link.push(part, size - media_bytes(part))
        except ProtocolError as error:
            self._doomed = True
            asyncio.get_running_loop().call_soon(self._lose, link, error.message)
        if self._pump is not None:
            self._pump.wake()

    def snapshot(self, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        """Yield all that the worker holds, over a separate connection; see kvasir.ports.session.Dialer."""
        return self._dialer.snapshot(self._address, epoch)

    async def run(self) -> None:
        """Keep the session until `close`. Call once."""
        if self._closed:
            return
        self._work = asyncio.ensure_future(self._keep())
        try:
            await asyncio.wait((self._work,))
        finally:
            await self.close()
        if not self._work.cancelled():
            self._work.result()

    async def close(self) -> None:
        """End the session at both ends. A worker that cannot be reached within `goodbye_s` ends it after its
        resume window. No event follows. Idempotent."""
        self._closed = True
        link, self._link = self._link, None
        self._stop_window()
        if self._work is not None:
            if link is not None and self._pump is not None:
                with contextlib.suppress(ProtocolError):
                    link.push(Goodbye(), payload_bytes(Goodbye()))
                    self._pump.wake()
                    await asyncio.wait((self._work,), timeout=self._limits.goodbye_s)
            self._work.cancel()
            await asyncio.wait((self._work,))

    async def _keep(self) -> None:
        while not self._closed:
            if self._failures:
                await self._clock.sleep(self._delay_s())
            try:
                connection = await self._dialer.dial(self._address, self._hello())
            except ConnectionLost as error:
                self._failures += 1
                self._unreached(str(error))
                continue
            except ProtocolError as error:
                self._refused(error.message)
                continue
            began = self._clock.now()
            try:
                await self._carry(connection)
            finally:
                await connection.close()
            # A worker that accepts connections and drops them must not be dialed in a tight loop.
            lasted = self._clock.now() - began >= self._limits.backoff_max_s
            self._failures = 0 if lasted else self._failures + 1

    def _hello(self) -> Hello:
        received = 0 if self._link is None else self._link.received_seq
        return Hello(router_id=self._router_id, session_id=self._session_id, received_seq=received)

    def _delay_s(self) -> float:
        # The first attempt after a break is immediate; bound the exponent before the power.
        doublings = min(self._failures - 1, 16)
        longest = min(self._limits.backoff_max_s, self._limits.backoff_min_s * 2.0**doublings)
        return longest * (0.5 + self._rng.random() / 2)

    def _unreached(self, reason: str) -> None:
        if self._link is None and reason != self._refusal:
            self._refusal = reason
            self._on_event(SessionUnreachable(self._worker_id, reason))

    def _refused(self, reason: str) -> None:
        self._failures += 16
        if reason != self._refusal:
            self._refusal = reason
            self._on_event(SessionRefused(self._worker_id, reason))

    async def _carry(self, connection: RouterConnection) -> None:
        link = self._adopt(connection.welcome)
        if link is None:
            return
        pump: SessionPump[RouterMessage, WorkerMessage | EncodedStep, RouterFrame] = SessionPump(
            connection,
            link,
            frame=RouterFrame,
            process=self._deliver,
            clock=self._clock,
        )
        self._pump = pump
        watch = asyncio.ensure_future(self._break_when_inactive(pump))
        try:
            await pump.run()
        except ConnectionLost as error:
            self._interrupt(link, str(error))
        except ProtocolError as error:
            self._lose(link, error.message)
        finally:
            watch.cancel()
            self._pump = None

    async def _break_when_inactive(
        self, pump: SessionPump[RouterMessage, WorkerMessage | EncodedStep, RouterFrame]
    ) -> None:
        waited_s = await wait_inactive(lambda: pump.last_received_s, self._patience.timeout_s, self._clock)
        self._patience.hurry()
        pump.stop(f"no frame for {waited_s:g} s")

    def _adopt(self, welcome: Welcome) -> SessionLink[RouterMessage] | None:
        """Return the link of the session that the worker answered with; None if there is nothing to carry."""
        link = self._link
        if welcome.resumed:
            if link is None or welcome.session_id != self._session_id:
                # It was given up while the worker still answered: start a new one.
                return None
            try:
                link.resume(welcome.received_seq)
            except ProtocolError as error:
                self._lose(link, error.message)
                return None
        else:
            if link is not None:
                self._lose(link, "the worker no longer has the session")
            link = self._link = SessionLink(self._limits.link)
            self._session_id = welcome.session_id
        self._stop_window()
        self._refusal = None
        self._on_event(SessionReady(self._worker_id, welcome.identity, welcome.resumed))
        return link

    def _deliver(self, message: WorkerMessage | EncodedStep) -> None:
        if not self._closed:
            self._on_event(SessionMessage(self._worker_id, message))

    def _interrupt(self, link: SessionLink[RouterMessage], reason: str) -> None:
        if self._link is link and not self._doomed:
            self._window = asyncio.ensure_future(self._give_up(link))
            self._on_event(SessionInterrupted(self._worker_id, reason))

    async def _give_up(self, link: SessionLink[RouterMessage]) -> None:
        await self._clock.sleep(self._limits.resume_window_s)
        self._window = None
        self._lose(link, f"not resumed within {self._limits.resume_window_s:g} s")

    def _lose(self, link: SessionLink[RouterMessage], reason: str) -> None:
        if self._link is not link:
            return
        self._link = None
        self._session_id = ""
        self._refusal = None
        self._doomed = False
        self._stop_window()
        if self._pump is not None:
            self._pump.stop()
        self._on_event(SessionLost(self._worker_id, reason))

    def _stop_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None

    def _split(self, submit: Submit) -> Iterator[tuple[Submit, int]]:
        """Split requests into messages, in order, with their sizes in bytes."""
        part: list[EngineRequest] = []
        room = self._limits.submit_bytes
        for request in submit.requests:
            size = payload_bytes(Submit((request,)))
            if size > self._limits.request_bytes:
                raise RequestError(
                    f"the request takes {size} bytes on the wire, the limit is {self._limits.request_bytes}",
                    status=413,
                    code="request_too_large",
                )
            if part and size > room:
                yield Submit(tuple(part)), self._limits.submit_bytes - room
                part, room = [], self._limits.submit_bytes
            part.append(request)
            room -= size
        if part:
            yield Submit(tuple(part)), self._limits.submit_bytes - room
