"""A whole deployment in one event loop: the production router and session code, simulated engines, and a
network that fails on request. Under virtual time, an hour of it takes seconds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from kvasir.config.spec.deployment import Deployment
from kvasir.core.membership import Endpoint
from kvasir.core.requests import Request, Sampling, token_ids
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestSummary, WorkerView
from kvasir_platform.sim.client import ClientStream, OnStream
from kvasir_platform.sim.faults import Faults
from kvasir_platform.sim.net.discovery import FeedDiscovery
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_platform.sim.worker import (
    TOKENIZER_DIGEST,
    InventedAdapters,
    SimWorker,
    StallingFabric,
    start_worker,
)
from kvasir_router.build import make_router
from kvasir_router.shell import Router, unobserved
from kvasir_workers.adapters.host import AdapterFileStore
from kvasir_workers.engines.sim.model import SimModel

__all__ = ["TOKENIZER_DIGEST", "ClientStream", "Cluster", "SimWorker"]


@dataclass
class SimRouter:
    """One router process."""

    router: Router
    running: asyncio.Task[None]


@dataclass
class Cluster:
    """Start it with `start`, end it with `close`, which also checks that nothing is left.

    Everything random derives from `seed`, so that a history replays exactly. `on_decision` gets the duration
    of each decision, in seconds, and `on_stream` everything that reaches clients. `adapter_files` makes a
    worker's source of adapters. `routers` are the living ones, by id; the first of them is `router`.
    """

    deployment: Deployment
    clock: Clock
    seed: int = 0
    on_decision: Callable[[float], None] = unobserved
    on_stream: OnStream | None = None
    adapter_files: Callable[[], AdapterFileStore] = InventedAdapters
    workers: dict[str, SimWorker] = field(default_factory=dict)
    routers: dict[str, SimRouter] = field(default_factory=dict)
    summaries: list[RequestSummary] = field(default_factory=list)
    views: list[WorkerView] = field(default_factory=list)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    fabric: StallingFabric = field(default_factory=StallingFabric)
    discovery: FeedDiscovery = field(default_factory=FeedDiscovery)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lost: list[SimWorker] = field(default_factory=list)

    @property
    def router(self) -> Router:
        """The production router."""
        for each in self.routers.values():
            return each.router
        raise RuntimeError("the cluster has not been started")

    @property
    def faults(self) -> Faults:
        """The faults that can be injected into it."""
        return Faults(self)

    async def start(self) -> None:
        """Start the router, and every pool with its replicas; return when all of them may serve."""
        self._start_router("router")
        for pool in self.deployment.pools:
            for _ in range(pool.replicas):
                await self.add(pool.name)
        await self.ready()

    async def ready(self) -> None:
        """Wait until every router may use every worker."""
        for each in list(self.routers.values()):
            while {view.worker_id for view in each.router.workers() if view.state == "ready"} != set(
                self.workers
            ):
                await self.clock.sleep(0.01)

    # -- routers ---------------------------------------------------------------------------------

    async def restart_router(self) -> None:
        """Stop the router in order, and replace it by an empty one."""
        await self._stop_router(next(iter(self.routers)))
        self.add_router()
        await self.ready()

    def add_router(self) -> str:
        """Start one more router, with empty state. Return its id."""
        router_id = f"router-{next(self._numbers)}"
        self._start_router(router_id)
        return router_id

    async def kill_router(self, router_id: str) -> None:
        """Kill the router's process, and its streams with it; workers see broken connections."""
        self.network.bury(router_id)
        await self._stop_router(router_id)

    def _start_router(self, router_id: str) -> None:
        seed = self.seed if router_id == "router" else f"{self.seed}/{router_id}"
        router = make_router(
            self.deployment,
            tokenizer_digest=TOKENIZER_DIGEST,
            discovery=self.discovery,
            dialer=self.network,
            clock=self.clock,
            rng=Random(seed),  # noqa: S311 - a simulation has to repeat
            router_id=router_id,
            on_summary=self.summaries.append,
            on_worker=self.views.append,
            on_decision=self.on_decision,
        )
        self.routers[router_id] = SimRouter(router, asyncio.create_task(router.run(), name=router_id))

    async def _stop_router(self, router_id: str) -> None:
        ending = self.routers.pop(router_id)
        await ending.router.close()
        await ending.running

    # -- workers ---------------------------------------------------------------------------------

    async def add(self, pool: str, model: SimModel | None = None) -> SimWorker:
        """Start one more replica, of `model` if it differs; it serves a moment later."""
        worker_id = f"{pool}-{next(self._numbers)}"
        worker = await self._launch(Endpoint(worker_id, worker_id, pool), model=model)
        await self.discovery.put(*self.discovery.endpoints, worker.endpoint)
        return worker

    async def revive(self, endpoint: Endpoint, epoch: int) -> SimWorker:
        """Restart the worker at its address, with an empty cache."""
        return await self._launch(endpoint, epoch=epoch)

    async def kill(self, worker_id: str) -> SimWorker:
        """Kill the worker's process; discovery finds out later, by `forget`."""
        worker = self.workers.pop(worker_id)
        self.network.unlisten(worker_id)
        self.network.cut(worker_id)
        worker.process.thaw()
        await worker.engine.stop()
        await worker.host.close()
        return worker

    def vanish(self, worker_id: str) -> SimWorker:
        """Remove the host without closing connections: they stay open, and nothing answers."""
        worker = self.workers.pop(worker_id)
        worker.process.freeze()
        self.fabric.stalled.add(worker_id)
        self._lost.append(worker)
        return worker

    async def stop(self, worker_id: str, reason: str, grace_s: float) -> SimWorker:
        """Stop the worker as planned: it drains for at most `grace_s`, and leaves."""
        worker = self.workers[worker_id]
        await worker.host.drain(reason, grace_s)
        await worker.host.close()
        self.workers.pop(worker_id, None)
        self.network.unlisten(worker_id)
        self.network.cut(worker_id)
        await worker.engine.stop()
        return worker

    async def forget(self, worker_id: str) -> None:
        """Remove the worker from discovery."""
        await self.discovery.put(*(e for e in self.discovery.endpoints if e.worker_id != worker_id))

    async def _launch(
        self, endpoint: Endpoint, *, epoch: int = 1, model: SimModel | None = None
    ) -> SimWorker:
        worker = await start_worker(
            endpoint,
            self.deployment,
            self.clock,
            self.fabric,
            epoch=epoch,
            model=model,
            adapter_files=self.adapter_files,
        )
        self.workers[endpoint.worker_id] = worker
        self.fabric.stalled.discard(endpoint.worker_id)
        host = worker.host
        self.network.listen(endpoint.address, host.serve, host.snapshot, worker.process)
        return worker

    # -- clients ---------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        sampling: Sampling | None = None,
        *,
        salt: str = "",
        adapter: str | None = None,
        deadline_s: float | None = None,
        router_id: str | None = None,
    ) -> ClientStream:
        """Send a client's request to a router, by default the first. `deadline_s` counts from now. Raises the
        router's refusal."""
        now = self.clock.now()
        request = Request(
            request_id=f"r{next(self._numbers)}",
            model=self.deployment.model.name,
            tokens=token_ids(tokens),
            sampling=sampling or Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
            salt=salt,
            adapter=adapter,
            arrival_s=now,
            deadline_s=None if deadline_s is None else now + deadline_s,
        )
        stream = ClientStream(request, self.on_stream)
        router = self.router if router_id is None else self.routers[router_id].router
        router.submit(request, stream)
        return stream

    # -- ends ------------------------------------------------------------------------------------

    async def rest(self, within_s: float | None = None) -> None:
        """Wait until nothing runs and nothing is pinned, and check every invariant. Raises AssertionError
        after `within_s`."""
        deadline = None if within_s is None else self.clock.now() + within_s
        while busy := self._busy():
            self.check()
            if deadline is not None and self.clock.now() >= deadline:
                raise AssertionError(f"not at rest after {within_s:g} s: {busy}")
            await self.clock.sleep(0.05)
        self.check()

    def _busy(self) -> str:
        """Return what still runs or is pinned, "" for nothing."""
        for router_id, each in self.routers.items():
            if each.router.in_flight:
                return f"{each.router.in_flight} requests in {router_id}"
        for worker_id, worker in self.workers.items():
            leased = worker.engine.load().kv_blocks_leased
            if worker.host.live_requests or worker.host.held_leases or leased:
                return (
                    f"{worker_id}: {worker.host.live_requests} legs, {worker.host.held_leases} leases, "
                    f"{leased} blocks leased"
                )
        return ""

    def check(self) -> None:
        """Raises AssertionError if a router or an engine does not account for what it holds."""
        for each in self.routers.values():
            each.router.validate_state()
        for worker in self.workers.values():
            worker.engine.check_integrity()

    async def close(self) -> None:
        """Stop everything, in the order of a deployment."""
        for worker in self.workers.values():
            worker.process.thaw()
        for router_id in list(self.routers):
            await self._stop_router(router_id)
        await self.discovery.close()
        everyone = [*self.workers.values(), *self._lost]
        for worker in everyone:
            worker.process.thaw()
            await worker.host.close()
        await self.network.close()
        for worker in everyone:
            await worker.engine.stop()
