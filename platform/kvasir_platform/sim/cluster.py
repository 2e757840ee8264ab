"""A whole deployment in one event loop: the production router and session code, simulated engines, and a
network that breaks when a test says so. Under virtual time an hour of it takes seconds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from kvasir.config.spec import Deployment
from kvasir.core.errors import KvasirError
from kvasir.core.membership import Endpoint
from kvasir.core.requests import Delta, Request, Sampling, token_ids
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestSummary, WorkerView
from kvasir_platform.sim.discovery import FeedDiscovery
from kvasir_platform.sim.memory_transport import MemoryNetwork
from kvasir_router.build import make_router
from kvasir_router.shell import Router, unobserved
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.engines.sim.fabric import SimFabric
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.server.sessions import SessionHost, SessionHostLimits

TOKENIZER_DIGEST = "simulated"


class Stream:
    """A client: the StreamSink of one request, which insists on whole streams."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.last: Delta | None = None
        self.summary: RequestSummary | None = None
        self.error: KvasirError | None = None
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    def on_delta(self, delta: Delta) -> None:
        """See StreamSink. Raises AssertionError when a token was lost or repeated."""
        tokens = self.tokens[delta.index]
        if self.ended.is_set() or delta.offset != len(tokens):
            raise AssertionError(f"{delta.request_id}: token {delta.offset} came at {len(tokens)}")
        tokens.extend(delta.token_ids)
        self.last = delta
        self.started.set()

    def on_finish(self, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._end(summary)

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        """See StreamSink."""
        self.error = error
        self._end(summary)

    async def finished(self) -> RequestSummary:
        """Wait for the end. Raises the error if it was one."""
        await self.ended.wait()
        if self.error is not None:
            raise self.error
        if self.summary is None:
            raise AssertionError("ended without a summary")
        return self.summary

    def _end(self, summary: RequestSummary) -> None:
        if self.ended.is_set():
            raise AssertionError(f"{summary.request_id} ended twice")
        self.summary = summary
        self.ended.set()


@dataclass
class SimWorker:
    """One worker process: its engine and its sessions."""

    endpoint: Endpoint
    engine: SimEngine
    host: SessionHost


@dataclass
class Cluster:
    """Start it with `start`, end it with `close`, which also checks that nothing was left behind.

    Everything random comes from `seed`, so that a history replays exactly. `on_decision` is told what each
    decision took, in seconds.
    """

    deployment: Deployment
    clock: Clock
    seed: int = 0
    on_decision: Callable[[float], None] = unobserved
    workers: dict[str, SimWorker] = field(default_factory=dict)
    summaries: list[RequestSummary] = field(default_factory=list)
    views: list[WorkerView] = field(default_factory=list)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    fabric: SimFabric = field(default_factory=SimFabric)
    discovery: FeedDiscovery = field(default_factory=FeedDiscovery)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _router: Router | None = None
    _running: asyncio.Task[None] | None = None

    @property
    def router(self) -> Router:
        """The production router."""
        if self._router is None:
            raise RuntimeError("the cluster has not been started")
        return self._router

    async def start(self) -> None:
        """The router, and every pool with its replicas; returns when all of them may serve."""
        self._start_router()
        for pool in self.deployment.pools:
            for _ in range(pool.replicas):
                await self.add(pool.name)
        await self.ready()

    async def ready(self) -> None:
        """Wait until the router may use every worker."""
        while {view.worker_id for view in self.router.workers() if view.state == "ready"} != set(
            self.workers
        ):
            await self.clock.sleep(0.01)

    async def restart_router(self) -> None:
        """The router ends in good order, and another one that knows nothing takes its place."""
        await self._stop_router()
        self._start_router()
        await self.ready()

    def _start_router(self) -> None:
        self._router = make_router(
            self.deployment,
            tokenizer_digest=TOKENIZER_DIGEST,
            discovery=self.discovery,
            dialer=self.network,
            clock=self.clock,
            rng=Random(self.seed),  # noqa: S311 - a simulation has to repeat
            router_id=f"router-{next(self._numbers)}" if self._router is not None else "router",
            on_summary=self.summaries.append,
            on_worker=self.views.append,
            on_decision=self.on_decision,
        )
        self._running = asyncio.create_task(self._router.run(), name="router")

    async def _stop_router(self) -> None:
        await self.router.close()
        if self._running is not None:
            await self._running

    async def add(self, pool: str, model: SimModel | None = None) -> SimWorker:
        """One more replica, of `model` if it is to differ; it serves a moment later."""
        worker_id = f"{pool}-{next(self._numbers)}"
        engine = SimEngine(
            self.deployment,
            self.deployment.pool(pool),
            clock=self.clock,
            fabric=self.fabric,
            model=model,
            tokenizer_digest=TOKENIZER_DIGEST,
        )
        window_s = self.deployment.worker.resume_window_s
        host = await SessionHost.start(
            engine,
            worker_id=worker_id,
            epoch=1,
            clock=self.clock,
            limits=SessionHostLimits(resume_window_s=window_s),
        )
        worker = SimWorker(Endpoint(worker_id, worker_id, pool), engine, host)
        self.workers[worker_id] = worker
        self.network.listen(worker_id, host.serve, host.snapshot)
        await self.discovery.put(*self.discovery.endpoints, worker.endpoint)
        return worker

    async def kill(self, worker_id: str) -> None:
        """The process is gone at once; discovery finds out later, by `forget`."""
        worker = self.workers.pop(worker_id)
        self.network.unlisten(worker_id)
        self.network.cut(worker_id)
        await worker.engine.stop()
        await worker.host.close()

    async def forget(self, worker_id: str) -> None:
        """Discovery no longer names the worker."""
        await self.discovery.put(*(e for e in self.discovery.endpoints if e.worker_id != worker_id))

    def submit(
        self,
        tokens: Sequence[int],
        sampling: Sampling | None = None,
        *,
        salt: str = "",
        deadline_s: float | None = None,
    ) -> Stream:
        """A client's request. `deadline_s` counts from now. Raises what the router refuses it with."""
        now = self.clock.now()
        request = Request(
            request_id=f"r{next(self._numbers)}",
            model=self.deployment.model.name,
            tokens=token_ids(tokens),
            sampling=sampling or Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
            salt=salt,
            arrival_s=now,
            deadline_s=None if deadline_s is None else now + deadline_s,
        )
        stream = Stream(request)
        self.router.submit(request, stream)
        return stream

    async def rest(self) -> None:
        """Wait until nothing runs and nothing is pinned anywhere, and check every invariant."""
        while self.router.in_flight or any(
            w.host.live_requests or w.host.held_leases or w.engine.load().kv_blocks_leased
            for w in self.workers.values()
        ):
            self.check()
            await self.clock.sleep(0.05)
        self.check()

    def check(self) -> None:
        """Raises AssertionError when router or engines do not account for what they hold."""
        self.router.validate_state()
        for worker in self.workers.values():
            worker.engine.check_integrity()

    async def close(self) -> None:
        """End everything, in the order in which a deployment ends."""
        await self._stop_router()
        await self.discovery.close()
        for worker in list(self.workers.values()):
            await worker.host.close()
        await self.network.close()
        for worker in list(self.workers.values()):
            await worker.engine.stop()
