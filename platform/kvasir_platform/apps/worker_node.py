"""One worker: the engine that the spec names, its sessions, and their gRPC server.

The same node runs inside a Ray Serve replica and in a process of its own:

    python -m kvasir_platform.apps.worker_node --deployment kvasir.yaml --pool decode --port 7001
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from kvasir.clock import MonotonicClock
from kvasir.collector import freeze_gc
from kvasir.config.load.loader import load
from kvasir.config.load.model_files import configured_template, resolve_model, tokenizer_digest
from kvasir.config.load.model_parsers import resolved
from kvasir.config.load.model_support import refuse_model, served_classes
from kvasir.config.load.support import engine_platform
from kvasir.config.spec.deployment import Deployment, PoolSpec, is_loopback
from kvasir.config.spec.routing import strictest
from kvasir.core.errors import ConfigError, EngineStartError, KvasirError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.membership import Endpoint, host_port
from kvasir.core.requests import Role
from kvasir.core.session_link import LinkLimits
from kvasir.ports.adapters import AdapterEngine
from kvasir.ports.clock import Clock
from kvasir.ports.engine import Engine
from kvasir.telemetry.leg_spans import otlp_leg_recorder
from kvasir.telemetry.logs import configure_logging
from kvasir_platform.apps.common.kv_size import with_kv_size
from kvasir_platform.apps.common.locality import locality_of
from kvasir_platform.apps.common.own_gpus import with_own_gpus
from kvasir_platform.apps.common.peer_tls import tls_names, with_tls_dir, worker_files
from kvasir_platform.apps.common.pod import POD, at_pod
from kvasir_platform.apps.common.prefix_caching import with_possible_caching
from kvasir_platform.apps.common.session_token import session_token
from kvasir_platform.apps.common.weight_reading import with_strategy
from kvasir_platform.cluster.preflight.cpus import usable_cpus
from kvasir_platform.cluster.preflight.host_memory import available_memory
from kvasir_workers.adapters.host import AdapterHost
from kvasir_workers.adapters.store import AdapterStore
from kvasir_workers.engines.gpu_watched import GpuReader, GpuWatchedEngine
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.traced import TracedEngine
from kvasir_workers.engines.vllm.setup.arguments import threads_per_rank
from kvasir_workers.pool.progress import WatchedEngine
from kvasir_workers.server.grpc_server import GrpcServer, ServerTls
from kvasir_workers.server.sessions import SessionHost, SessionHostLimits
from kvasir_workers.transfer.common.nics import nics

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0


def build_engine(
    deployment: Deployment, pool: PoolSpec, clock: Clock, place: NodePlace | None = None
) -> Engine:
    """Return the engine adapter that a pool of the single-model `deployment` names, at `place` if it has
    several nodes. Raises ConfigError if its model cannot be found or served."""
    folder = resolve_model(deployment.model.source, deployment.model.revision)
    deployment = resolved(deployment, folder)
    pool = deployment.pool(pool.name)
    embeds = pool.role is Role.EMBED
    if pool.engine.kind == "sim":
        from kvasir_platform.gateway.prompt.golden import edge_golden
        from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer
        from kvasir_workers.engines.sim.embedding import SimEmbeddingEngine
        from kvasir_workers.engines.sim.engine import SimEngine

        # A simulated engine has no tokenizer of its own and uses the edge's.
        template = configured_template(deployment.model.chat_template)
        tokenizer = ModelTokenizer.from_folder(folder, template=template)
        golden = edge_golden(deployment.model.name, tokenizer)
        digest = tokenizer_digest(folder, template)
        if not embeds:
            return SimEngine(deployment, pool, clock=clock, tokenizer_digest=digest, golden=golden)
        classes = served_classes(deployment, folder)
        return SimEmbeddingEngine(
            deployment,
            pool,
            clock=clock,
            tokenizer_digest=digest,
            golden=golden,
            classes=0 if classes is None else len(classes.labels),
        )
    refuse_model(deployment, folder)
    if embeds:
        from kvasir_workers.engines.vllm.embedding import VllmEmbeddingEngine

        return VllmEmbeddingEngine(deployment, pool, model_path=str(folder), place=place)
    from kvasir_workers.engines.vllm.engine import VllmEngine

    return VllmEngine(deployment, pool, model_path=str(folder), place=place)


def _open_gpus(devices: int) -> GpuReader | None:
    # vLLM is imported by its engine, which sets the environment that it reads.
    from kvasir_workers.engines.vllm.gpu_counters import open_gpus

    return open_gpus(devices)


def adapter_host(deployment: Deployment, engine: Engine, clock: Clock) -> AdapterHost | None:
    """Return the host of adapters that are loaded at run time, None if the single-model `deployment` loads
    none."""
    if not deployment.lora_loading.enabled or not isinstance(engine, AdapterEngine):
        return None
    model = deployment.model
    taken = (model.name, *(lora.name for lora in deployment.lora))
    base = resolve_model(model.source, model.revision)
    store = AdapterStore(deployment.lora_loading, base)
    return AdapterHost(engine, store, deployment.lora_loading, clock, taken=taken)


def worker_view(deployment: Deployment, pool_name: str, cpus: int, *, alone: bool = False) -> Deployment:
    """Return the deployment as a worker of that pool uses it: with the pool's model only. Pools of other
    models share the machine, so its part of the `cpus` is computed before they are removed. `alone`: nothing
    is shared, as in a pod of its own; each node of an engine has as much."""
    view = deployment.view_of(pool_name)
    if alone:
        pool = view.pool(pool_name)
        only = deployment.model_copy(update={"pools": (pool.model_copy(update={"replicas": 1}),)})
        cpus *= pool.engine.nodes
        pools = tuple(_with_threads(only, pool, cpus) if each is pool else each for each in view.pools)
        return view.model_copy(update={"pools": pools})
    pools = tuple(_with_threads(deployment, pool, cpus) for pool in view.pools)
    return view.model_copy(update={"pools": pools})


def _with_threads(deployment: Deployment, pool: PoolSpec, cpus: int) -> PoolSpec:
    threads = threads_per_rank(deployment, pool, cpus=cpus)
    return pool.model_copy(update={"engine": pool.engine.model_copy(update={"threads": threads})})


class WorkerNode:
    """A running worker; see kvasir_workers.pool.replica.Node."""

    def __init__(
        self,
        engine: WatchedEngine,
        serving: Engine,
        host: SessionHost,
        server: GrpcServer,
        endpoint: Endpoint,
    ) -> None:
        self._engine = engine
        self._serving = serving
        self._host = host
        self._server = server
        self._endpoint = endpoint
        self._failure = asyncio.create_task(server.follow(engine.wait_failed))

    @classmethod
    async def start(
        cls,
        deployment: Deployment,
        pool_name: str,
        token: str | None,
        clock: Clock,
        place: NodePlace | None = None,
    ) -> WorkerNode:
        """Load the engine, at `place` if it has several nodes, then listen. Raises ConfigError with the
        reason and the remedy."""
        alone = deployment.worker.host == POD
        deployment = at_pod(deployment, os.environ)
        files = worker_files(deployment, pool_name)
        view = worker_view(deployment, pool_name, max(1, int(usable_cpus())), alone=alone)
        free = available_memory()[0]
        view = with_possible_caching(view, pool_name)
        view = with_kv_size(deployment, view, pool_name, free=free, alone=alone)
        view = with_strategy(view, pool_name, free=free)
        locality = locality_of(deployment.pool(pool_name), os.environ, nics())
        worker_id = f"{pool_name}-{uuid4().hex[:8]}"
        built = build_engine(view, view.pool(pool_name), clock, place)
        collector = deployment.telemetry.otlp_endpoint
        spans = otlp_leg_recorder(collector, deployment.name, worker_id, strictest(deployment.slo))
        engine = WatchedEngine(built if spans is None else TracedEngine(built, spans, clock), clock)
        spec = deployment.worker
        limits = SessionHostLimits(
            link=LinkLimits(tail_messages=spec.tail_messages),
            resume_window_s=spec.resume_window_s,
            heartbeat_s=spec.heartbeat_s,
        )
        serving: Engine = engine
        if view.pool(pool_name).reserved_gpus and view.pool(pool_name).engine.kind == "vllm":
            serving = GpuWatchedEngine(engine, _open_gpus, clock)
        host = await SessionHost.start(
            serving,
            worker_id=worker_id,
            epoch=time.time_ns() // 1000,
            clock=clock,
            limits=limits,
            locality=locality,
            adapters=adapter_host(view, built, clock),
        )
        server = GrpcServer(
            host.serve,
            bind=host_port(spec.host, spec.port),
            token=token,
            snapshot=host.snapshot,
            tls=None if files is None else ServerTls(files, tls_names(deployment).router),
            health_bind=None if spec.health_port is None else host_port(spec.host, spec.health_port),
        )
        try:
            bound = await server.start()
        except ConfigError:
            await serving.stop()
            raise
        return cls(engine, serving, host, server, Endpoint(worker_id, host_port(spec.host, bound), pool_name))

    @property
    def endpoint(self) -> Endpoint:
        """The address at which routers connect."""
        return self._endpoint

    @property
    def identity(self) -> WorkerIdentity:
        """What a session tells every router of the worker."""
        return self._host.identity

    def stuck(self) -> str | None:
        """See WatchedEngine."""
        return self._engine.stuck()

    async def failed(self) -> str:
        """Wait until the engine dies, and return why."""
        return await asyncio.shield(self._failure)

    async def stop(self, reason: str, grace_s: float) -> None:
        """Announce the end to routers, let streams end within `grace_s` seconds, then stop everything."""
        if not await self._host.drain(reason, grace_s):
            log.warning("some streams did not end within %.0f s and are aborted", grace_s)
        self._failure.cancel()
        await self._host.close()
        await self._server.stop(STOP_GRACE_S)
        await self._serving.stop()


async def start_node(
    deployment: Deployment, pool: str, token: str, place: NodePlace | None = None
) -> WorkerNode:
    """The factory that a Ray Serve replica calls (kvasir_workers.pool.replica.NodeFactory)."""
    configure_logging(deployment.telemetry.log_level)
    node = await WorkerNode.start(deployment, pool, token, MonotonicClock(), place)
    freeze_gc()
    return node


async def serve(deployment: Deployment, pool: str, token: str | None) -> int:
    """Run one worker until SIGTERM, SIGINT or the engine's death. Return the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    node = await WorkerNode.start(deployment, pool, token, MonotonicClock())
    freeze_gc()
    endpoint = node.endpoint
    sys.stdout.write(
        json.dumps(
            {"event": "serving", "worker_id": endpoint.worker_id, "address": endpoint.address, "pool": pool}
        )
        + "\n"
    )
    sys.stdout.flush()
    stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(node.failed())
    await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        log.error("the engine failed: %s", failing.result())
        # The threads and processes of a dead engine may never end in order.
        os._exit(1)
    failing.cancel()
    await node.stop("the worker was asked to stop", deployment.worker.drain_s)
    return 0


def _on_this_machine(deployment: Deployment, pool: str) -> Deployment:
    # A replica of Ray Serve, whose GPUs the spec states, does not look at the machine.
    from kvasir_platform.cluster.preflight.devices import gpu_devices
    from kvasir_platform.cluster.preflight.probe import installed_packages

    platform = engine_platform(installed_packages()) or "cpu"
    return with_own_gpus(deployment, pool, present=len(gpu_devices(os.environ)), platform=platform)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvasir-worker",
        description="Run one worker outside Ray, for static discovery.",
    )
    parser.add_argument("--deployment", type=Path, required=True, help="kvasir.yaml")
    parser.add_argument("--pool", required=True, help="name of the pool that this worker is of")
    parser.add_argument(
        "--port", type=int, help="port of its session server, 0 for a free one; by default worker.port"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help="shared secret of sessions; by default worker.session_token_file of the spec",
    )
    parser.add_argument(
        "--tls-dir", type=Path, help="folder of certificates; by default what tls of the spec says"
    )
    args = parser.parse_args(argv)
    try:
        deployment = with_tls_dir(load(args.deployment), args.tls_dir)
        if args.pool not in {pool.name for pool in deployment.pools}:
            names = ", ".join(pool.name for pool in deployment.pools)
            raise ConfigError(f"{args.deployment} has no pool {args.pool!r}; it has: {names}")
        if deployment.pool(args.pool).engine.nodes > 1:
            raise ConfigError(
                f"pools.{args.pool}.engine.nodes: Ray places the nodes of one engine; start it with "
                "`kvasir up` or the chart, or set 1"
            )
        deployment = _on_this_machine(deployment, args.pool)
        token = session_token(deployment.worker, args.token_file)
        if token is None and not is_loopback(deployment.worker.host):
            raise ConfigError(
                f"worker.host: {deployment.worker.host} is open to the network without a session "
                "token; set worker.session_token_file, pass --token-file, or bind 127.0.0.1"
            )
        if args.port is not None:
            worker = deployment.worker.model_copy(update={"port": args.port})
            deployment = deployment.model_copy(update={"worker": worker})
        configure_logging(deployment.telemetry.log_level)
        return asyncio.run(serve(deployment, args.pool, token))
    except KvasirError as error:
        sys.stderr.write(f"kvasir-worker: {error.message}\n")
        if isinstance(error, EngineStartError) and error.remedy:
            sys.stderr.write(f"kvasir-worker: {error.remedy}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
