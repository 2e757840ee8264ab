"""A worker and its routers over breakable connections, with an engine whose every token is known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from tests.kit.engines.tier_blocks import Lines
from tests.kit.suite.versions import NoPreviousVersion, Version, previous_version

from kvasir.clock import MonotonicClock
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.membership import Endpoint
from kvasir.core.messages import EncodedStep, Submit
from kvasir.core.requests import (
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    Role,
    Sampling,
    StepBatch,
    Timings,
    Usage,
    token_ids,
)
from kvasir.core.session_link import LinkLimits
from kvasir.ports.clock import Clock
from kvasir.ports.engine import KvSource, StepSink
from kvasir.ports.session import Dialer
from kvasir_router.sessions.session import (
    SessionEvent,
    SessionLimits,
    SessionMessage,
    SessionReady,
    SessionUnreachable,
    WorkerSession,
)
from kvasir_workers.server.sessions import SessionHost, SessionHostLimits

LINK = LinkLimits(tail_messages=64, tail_bytes=1 << 20, ack_every=4, ack_delay_s=0.01)
STEP_S = 0.005


class CountingEngine:
    """Each step adds one token to every live leg: the prompt's first token plus the offset."""

    kv: KvSource | None = None

    def __init__(self, clock: Clock, step_s: float = STEP_S) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.abort_comes_too_late = False
        self.offers_early = False
        self._offered: set[str] = set()
        self._clock = clock
        self._step_s = step_s
        self._live: dict[str, tuple[EngineRequest, int]] = {}
        self._ending: list[str] = []
        self._work: asyncio.Task[None] | None = None

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        self._work = asyncio.ensure_future(self._run(sink))
        kv = KvLayout(16, "float32", "NHD", 2, 2, 32, 4096)
        return WorkerIdentity(
            worker_id, epoch, "pool", Role.BOTH, "m", "r", "d", 4096, kv, 64, "counting", "1"
        )

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            assert request.request_id not in self._live
            self.submitted.append(request.request_id)
            self._live[request.request_id] = (request, 0)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        if not self.abort_comes_too_late:
            self._ending.extend(one for one in request_ids if one in self._live)

    def release(self, lease_ids: Sequence[str]) -> None:
        self.released.extend(lease_ids)

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._live))

    async def wait_failed(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait((self._work,))

    async def _run(self, sink: StepSink) -> None:
        while True:
            await self._clock.sleep(self._step_s)
            if self.kv is not None:
                self.kv.flush()
            if deltas := [*self._abort_deltas(), *self._token_deltas()]:
                sink(StepBatch(tuple(deltas), self.load()))

    def _abort_deltas(self) -> list[Delta]:
        ending, self._ending = dict.fromkeys(self._ending), []
        return [
            Delta(one, self._live.pop(one)[1], finish=FinishReason.ABORT, last=True)
            for one in ending
            if one in self._live
        ]

    def _token_deltas(self) -> list[Delta]:
        deltas = []
        for request, offset in list(self._live.values()):
            last = request.leg is Leg.PREFILL or offset + 1 == request.sampling.max_tokens
            handoff = None
            if request.leg is Leg.PREFILL:
                handoff = KvHandoff(f"lease-{request.request_id}", 1, 20.0, 1, b"ticket")
                if self.offers_early and request.request_id not in self._offered:
                    self._offered.add(request.request_id)
                    deltas.append(Delta(request.request_id, 0, handoff=handoff))
                    continue
            token = request.tokens[0] + offset
            deltas.append(
                Delta(
                    request.request_id,
                    offset,
                    (token,),
                    f"{token} ",
                    finish=FinishReason.LENGTH if last else None,
                    last=last,
                    usage=Usage(output_tokens=offset + 1) if last else None,
                    timings=Timings() if last else None,
                    handoff=handoff,
                )
            )
            if last:
                del self._live[request.request_id]
            else:
                self._live[request.request_id] = (request, offset + 1)
        return deltas


@dataclass
class Router:
    """A session and all that it told; `tokens` by request, checked for offsets as they come."""

    session: WorkerSession
    clock: Clock
    events: list[SessionEvent] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, Delta] = field(default_factory=dict)
    on_event: Callable[[SessionEvent], None] = lambda _event: None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _running: asyncio.Task[None] | None = None

    def take(self, event: SessionEvent) -> None:
        self.events.append(event)
        said = event.message if isinstance(event, SessionMessage) else None
        step = said.decode(None) if isinstance(said, EncodedStep) else said
        if isinstance(step, StepBatch):
            for delta in step.deltas:
                got = self.tokens.setdefault(delta.request_id, [])
                assert delta.offset == len(got), f"{delta.request_id}: lost or repeated a token"
                assert delta.request_id not in self.last
                got.extend(delta.token_ids)
                if delta.last:
                    self.last[delta.request_id] = delta
        self.on_event(event)
        self._changed.set()

    def run(self) -> None:
        self._running = asyncio.ensure_future(self.session.run())

    async def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = asyncio.ensure_future(self.clock.sleep(within_s))
        while not condition():
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait((changed, deadline), return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            assert not deadline.done() or condition(), f"not within {within_s} s: {self.told()[-5:]}"
        deadline.cancel()

    def told(self) -> list[SessionEvent]:
        """Events about the session itself."""
        return [event for event in self.events if not isinstance(event, SessionMessage | SessionUnreachable)]

    async def ready(self, times: int = 1) -> None:
        await self.until(lambda: sum(isinstance(e, SessionReady) for e in self.events) >= times)

    async def ended(self, *request_ids: str) -> None:
        await self.until(lambda: all(one in self.last for one in request_ids))

    async def close(self) -> None:
        await self.session.close()
        if self._running is not None:
            await self._running


class Bench:
    """Builds hosts and routers on one clock, and ends them all."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._engines: list[CountingEngine] = []
        self._hosts: list[SessionHost] = []
        self._routers: list[Router] = []

    async def host(
        self, limits: SessionHostLimits | None = None, epoch: int = 1, kv: KvSource | None = None
    ) -> tuple[SessionHost, CountingEngine]:
        engine = CountingEngine(self.clock)
        engine.kv = kv
        self._engines.append(engine)
        host = await SessionHost.start(
            engine,
            worker_id="w",
            epoch=epoch,
            clock=self.clock,
            limits=limits or SessionHostLimits(link=LINK, resume_window_s=1.0),
        )
        self._hosts.append(host)
        return host, engine

    def router(
        self, dialer: Dialer, address: str, name: str = "router", limits: SessionLimits | None = None
    ) -> Router:
        routers: list[Router] = []

        def take(event: SessionEvent) -> None:
            routers[0].take(event)

        session = WorkerSession(
            Endpoint("w", address, "pool"),
            dialer,
            clock=self.clock,
            rng=Random(7),
            on_event=take,
            router_id=name,
            limits=limits or SessionLimits(link=LINK, resume_window_s=1.0, backoff_max_s=0.1),
        )
        routers.append(Router(session, self.clock))
        self._routers.append(routers[0])
        routers[0].run()
        return routers[0]

    async def close(self) -> None:
        for router in self._routers:
            await router.close()
        for host in self._hosts:
            await host.close()
        for engine in self._engines:
            await engine.stop()

    @staticmethod
    def submit(*wanted: tuple[str, int, int], leg: Leg = Leg.FULL) -> Submit:
        """Each (request id, first token, tokens to generate)."""
        return Submit(
            tuple(
                EngineRequest(request_id, token_ids([first]), Sampling(max_tokens=count), leg)
                for request_id, first, count in wanted
            )
        )


@pytest.fixture
def make_bench() -> Callable[[Clock], Bench]:
    return Bench


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO)
    return Lines(caplog)


@pytest.fixture
async def bench(make_bench: Callable[[Clock], Bench]) -> AsyncIterator[Bench]:
    """A bench in real time."""
    made = make_bench(MonotonicClock())
    yield made
    await made.close()


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The previous version with other messages."""
    try:
        found = previous_version(tmp_path_factory.mktemp("previous"))
    except NoPreviousVersion as reason:
        pytest.skip(str(reason))
    found.check()
    return found
