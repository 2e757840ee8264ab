"""Engines of this process behind all that a deployment has in front of them: sessions over gRPC, a router,
and a gateway on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random

import httpx
from tests.kit.engines.preloaded import preload_core
from tests.kit.gateway.http_edge import listening, models_of
from tests.kit.lab.proxy import TcpProxy
from tests.kit.suite.started import count_start

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment
from kvasir.ports.engine import Engine
from kvasir_platform.gateway.start import make_gateway, make_metrics
from kvasir_router.build import make_router
from kvasir_router.sessions.grpc_transport import GrpcDialer
from kvasir_router.sessions.static_discovery import StaticDiscovery
from kvasir_workers.engines.vllm.replica import VllmReplica
from kvasir_workers.server.grpc_server import GrpcServer
from kvasir_workers.server.sessions import SessionHost

WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """The only worker of `pool`: its engine, the sessions in front of it, and the `line` on which routers
    reach them."""

    pool: str
    engine: Engine
    host: SessionHost
    line: TcpProxy


@asynccontextmanager
async def serving_worker(engine: Engine, pool: str) -> AsyncIterator[ServedWorker]:
    """Start `engine` as a worker of `pool`, which ends with the block."""
    clock = MonotonicClock()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        if isinstance(engine, VllmReplica):
            preload_core(engine)
            count_start("engines of vLLM", f"{pool}-0")
        host = await SessionHost.start(engine, worker_id=f"{pool}-0", epoch=1, clock=clock)
        stack.push_async_callback(host.close)
        server = GrpcServer(host.serve, bind="127.0.0.1:0", token=None, snapshot=host.snapshot)
        stack.push_async_callback(server.stop, 1.0)
        target = f"127.0.0.1:{await server.start()}"
        rng = Random(0)
        line = await stack.enter_async_context(TcpProxy(target, clock=clock, rng=rng))
        yield ServedWorker(pool, engine, host, line)


@asynccontextmanager
async def in_front_of(
    workers: Sequence[ServedWorker], deployment: Deployment
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that serves `deployment` on these workers. All of them are ready."""
    clock = MonotonicClock()
    identity = workers[0].host.identity
    router = make_router(
        deployment,
        tokenizer_digest=identity.tokenizer_digest,
        golden=identity.golden,
        discovery=StaticDiscovery(f"{worker.pool}={worker.line.address}" for worker in workers),
        dialer=GrpcDialer(None),
        clock=clock,
        rng=Random(0),
        router_id="router",
    )
    routing = asyncio.create_task(router.run())
    try:
        async with asyncio.timeout(WITHIN_S):
            while [view.state for view in router.workers()] != ["ready"] * len(workers):
                await asyncio.sleep(0.01)
        gateway = make_gateway(deployment, router, clock, make_metrics(deployment), models_of(deployment))
        async with (
            listening(gateway) as (address, port, _),
            httpx.AsyncClient(base_url=f"http://{address}:{port}", timeout=WITHIN_S) as client,
        ):
            yield client
    finally:
        await router.close()
        await routing
