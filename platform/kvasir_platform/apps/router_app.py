"""The router process: request machine, sessions and, without edges, the gateway in one event loop.

It reaches workers through discovery and sessions only, and imports no engine. Progress and the address go to
standard output, one JSON object per line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import uvloop

from kvasir import native
from kvasir.clock import MonotonicClock
from kvasir.collector import freeze_gc
from kvasir.compiled import is_compiled
from kvasir.config.load.loader import load
from kvasir.config.load.model_files import configured_template, resolve_model, tokenizer_digest
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError, KvasirError
from kvasir.core.membership import Endpoint
from kvasir.ports.clock import Clock
from kvasir.ports.discovery import Discovery
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.logs import RequestLog, configure_logging
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.apps.common.peer_tls import cell_files, router_files, tls_names, with_tls_dir
from kvasir_platform.apps.common.session_token import session_token
from kvasir_platform.calibrate.files import read_profile
from kvasir_platform.cluster.preflight.cpus import usable_cpus
from kvasir_platform.edge.edges import Edges, edge_count
from kvasir_platform.gateway.app import Gateway
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.costs.keeper import CostKeeper, make_costs
from kvasir_platform.gateway.prompt.golden import edge_golden
from kvasir_platform.gateway.start import make_gateway, make_metrics, make_models
from kvasir_platform.gateway.tenants.callers import unchanged
from kvasir_platform.gateway.traffic.rollouts import Rollouts, make_rollouts
from kvasir_platform.planner.link import PlannerLink
from kvasir_platform.planner.rpc import PlannerClient
from kvasir_router.build import EdgeFacts, make_routers
from kvasir_router.mux import RouterMux
from kvasir_router.sessions.grpc_transport import DialTls, GrpcDialer
from kvasir_router.sessions.static_discovery import StaticDiscovery
from kvasir_router.shell import Router, unobserved

if TYPE_CHECKING:
    from kvasir_platform.regions.router import RegionRouter

log = logging.getLogger(__name__)

_SAMPLE_S = 5.0


def build_discovery(deployment: Deployment, ray_address: str | None, clock: Clock) -> Discovery:
    """Return the discovery adapter that the spec names. Raises ConfigError if an address or a cluster is
    missing."""
    if deployment.discovery.kind == "static":
        return StaticDiscovery(deployment.discovery.endpoints)
    if deployment.discovery.kind == "kubernetes":
        from kvasir_platform.cluster.kubernetes.discovery import KubernetesDiscovery

        return KubernetesDiscovery.in_cluster(deployment, clock, random.Random())  # noqa: S311 - spreads load
    if not ray_address:
        raise ConfigError("discovery: ray needs --ray-address")
    from kvasir_platform.cluster.ray.discovery import RayDiscovery

    return RayDiscovery(ray_address, deployment.name, clock)


def build_dialers(deployment: Deployment, token: str | None) -> Callable[[Endpoint], GrpcDialer]:
    """Return the function that makes a worker's dialer. Raises ConfigError for invalid certificates."""
    files, names = router_files(deployment), tls_names(deployment)
    if files is None:
        return lambda _: GrpcDialer(token)
    return lambda endpoint: GrpcDialer(token, tls=DialTls(files, names, endpoint.pool))


def edge_facts(deployment: Deployment, models: ModelTable) -> dict[str, EdgeFacts]:
    """Return what the workers of each model have to agree with."""
    facts = {}
    for view in deployment.views():
        name = view.model.name
        folder = resolve_model(view.model.source, view.model.revision)
        golden = edge_golden(name, models.find(name).model.tokenizer)
        template = configured_template(view.model.chat_template)
        facts[name] = EdgeFacts(tokenizer_digest(folder, template), golden)
    return facts


def warn_of_builds() -> None:
    """Warn of what was not built, and runs as Python."""
    if not native.IS_NATIVE:
        log.warning("the native extension is not built; block hashes are computed in Python, which is slower")
    if not is_compiled():
        log.warning(
            "the router is not compiled; it runs as Python, which takes more CPU time for each request"
        )


async def serve(
    deployment: Deployment,
    token: str | None,
    ray_address: str | None,
    planner: str | None = None,
    *,
    fast_path: bool = True,
) -> int:
    """Route and serve until SIGTERM or SIGINT, then drain. Return the exit status."""
    warn_of_builds()
    dialers = build_dialers(deployment, token)
    teller = _teller(planner, token)
    parts = _parts(deployment)
    discovery = build_discovery(deployment, ray_address, parts.clock)
    facts = edge_facts(deployment, parts.models)
    router = _router(parts, facts, discovery, dialers, fast_path=fast_path)
    cells = await _cells(parts, facts, router)
    gateway = _gateway(parts, router, cells)
    _stop_on_signals(gateway, cells)
    freeze_gc()
    routing = asyncio.create_task(router.run(), name="router")

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # Raised again below, once all requests have ended.
            log.error("the router has failed; this process drains and exits: %r", error)
        gateway.stop()

    routing.add_done_callback(ended)
    planning = _planning(parts, router, teller)
    keeping = _keeping(parts, router, cells)
    try:
        await gateway.serve(None, lambda host, port: _report("listening", address=f"{host}:{port}"))
    except OSError as error:
        spec = deployment.gateway
        raise ConfigError(
            f"gateway: cannot listen on {spec.host}:{spec.port}: {error.strerror}; choose another port"
        ) from error
    finally:
        planning.cancel()
        if teller is not None:
            await teller.close()
        await discovery.close()
        await router.close()
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
    await routing
    return 0


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the router and the gateway of this process share, as far as the spec has it."""

    deployment: Deployment
    router_id: str
    clock: Clock
    metrics: Metrics
    models: ModelTable
    rollouts: Rollouts | None
    costs: CostKeeper | None


def _parts(deployment: Deployment) -> _Parts:
    router_id, clock = f"router-{uuid4().hex[:8]}", MonotonicClock()
    return _Parts(
        deployment,
        router_id,
        clock,
        make_metrics(deployment),
        make_models(deployment),
        make_rollouts(deployment, clock, time.time),
        make_costs(deployment, router_id, clock, time.time),
    )


def _router(
    parts: _Parts,
    facts: Mapping[str, EdgeFacts],
    discovery: Discovery,
    dialers: Callable[[Endpoint], GrpcDialer],
    *,
    fast_path: bool,
) -> Router | RouterMux:
    """Return the routers of all models, whose figures the metrics read."""
    deployment, metrics = parts.deployment, parts.metrics
    stated = deployment.performance.profile
    router = make_routers(
        deployment,
        facts,
        discovery=discovery,
        dialer=dialers,
        clock=parts.clock,
        rng=random.Random(),  # noqa: S311 - spreads ties, guards nothing
        router_id=parts.router_id,
        on_summary=_observers(parts),
        on_decision=metrics.decided,
        profile=None if stated is None else read_profile(Path(stated)),
        fast_path=fast_path,
    )
    _track(metrics, router, discovery)
    return router


async def _cells(
    parts: _Parts, facts: Mapping[str, EdgeFacts], router: Router | RouterMux
) -> RegionRouter | None:
    """Return the router over several cells, which listens; None if the spec has no regions."""
    deployment = parts.deployment
    if deployment.regions is None:
        return None
    # Only routers of several cells pay for what these load.
    from kvasir_platform.regions.grpc_cells import CellTls
    from kvasir_platform.regions.start import make_region_router, over_grpc

    files = cell_files(deployment)
    tls = None if files is None else CellTls(files, deployment.tls.trust_domain)
    dialer, listener = over_grpc(deployment.regions, tls)
    cells = make_region_router(
        deployment,
        router,
        parts.clock,
        dialer=dialer,
        listener=listener,
        router_id=parts.router_id,
        tokenizers={model: each.tokenizer_digest for model, each in facts.items()},
        epoch=time.time_ns() // 1000,
        budgets=None if parts.costs is None else parts.costs.budgets,
        media={model.name: inputs for model in parts.models.models if (inputs := model.capabilities.media)},
    )
    parts.metrics.track_cells(cells.cells)
    await cells.start()
    return cells


def _stop_on_signals(gateway: Edges | Gateway, cells: RegionRouter | None) -> None:
    def stop() -> None:
        if cells is not None:
            cells.leave()
        gateway.stop()

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop)


def _gateway(parts: _Parts, router: Router | RouterMux, cells: RegionRouter | None) -> Edges | Gateway:
    """Return what serves HTTP: edge processes, or a gateway in this one."""
    deployment, clock, metrics, models = parts.deployment, parts.clock, parts.metrics, parts.models
    rollouts, costs = parts.rollouts, parts.costs
    front = router if cells is None else cells
    over = unchanged if cells is None else cells.limits
    edges = edge_count(deployment.gateway.edges, usable_cpus())
    if not edges:
        return make_gateway(
            deployment, front, clock, metrics, models, rollouts=rollouts, costs=costs, limits_over=over
        )
    return Edges(
        edges,
        deployment,
        front,
        clock=clock,
        metrics=metrics,
        models=models,
        rollouts=rollouts,
        costs=costs,
        limits_over=over,
    )


def _track(metrics: Metrics, router: Router | RouterMux, discovery: Discovery) -> None:
    """Have the metrics read the router's figures."""
    metrics.track_queued(lambda: router.queued)
    metrics.track_tasks(lambda: len(asyncio.all_tasks()))
    metrics.track_index(router.index_stats)
    metrics.track_accounting(router.accounting)
    metrics.track_links(router.link_transfers)
    metrics.track_regret(router.regret)
    metrics.track_admission(router.admission)
    metrics.track_discovery(discovery.stale_s)


def _observers(parts: _Parts) -> Callable[[RequestSummary], None]:
    """Return what is called for each request that ended."""
    observers: list[Callable[[RequestSummary], None]] = []
    if parts.costs is not None:
        observers.append(parts.costs.ledger.ended)
    if parts.rollouts is not None:
        observers.append(parts.rollouts.ended)
    if (logged := parts.deployment.telemetry.request_logs) != "none":
        observers.append(RequestLog(every=logged == "all").ended)
    if len(observers) < 2:
        return observers[0] if observers else unobserved

    def ended(summary: RequestSummary) -> None:
        for observer in observers:
            observer(summary)

    return ended


def _planning(parts: _Parts, router: Router | RouterMux, teller: PlannerClient | None) -> asyncio.Task[None]:
    """Return the task that talks to the planner, one that has ended without any."""
    if teller is None:
        return asyncio.create_task(asyncio.sleep(0), name="no planner")
    link = PlannerLink(router, teller, parts.clock, parts.router_id)
    parts.metrics.track_scaling(link.plans, link.inactive_s)
    return asyncio.create_task(link.run(), name="planner")


def _keeping(
    parts: _Parts, router: Router | RouterMux, cells: RegionRouter | None
) -> list[asyncio.Task[None]]:
    """Return the tasks that sample batches, keep links to other cells, and keep rollouts and costs, which are
    those of the router's workers. Requests are served also if they fail."""
    sampling = _sampled(parts, router)
    keeping = [_kept(sampling, "batches", "batches of workers are not sampled any more: %r")]
    if cells is not None:
        keeping.append(_kept(cells.run(), "cells", "other cells are not reached any more: %r"))
    rollouts, costs = parts.rollouts, parts.costs
    if rollouts is not None:
        parts.metrics.track_rollouts(rollouts.stats)
        failed = "the rollouts have failed; shares of canaries stay as they are: %r"
        keeping.append(_kept(rollouts.run(), "rollouts", failed))
    if costs is not None:
        costs.ledger.source = router
        parts.metrics.track_costs(costs.figures)
        keeping.append(_kept(costs.run(), "costs", "costs are not counted any more: %r"))
    return keeping


async def _sampled(parts: _Parts, router: Router | RouterMux) -> None:
    """Observe the batches of workers for the metrics, until cancelled."""
    largest = {pool.name: pool.engine.largest_batch for pool in parts.deployment.pools}
    while True:
        await parts.clock.sleep(_SAMPLE_S)
        parts.metrics.batches(router.workers(), largest)


def _kept(work: Coroutine[Any, Any, None], name: str, failed: str) -> asyncio.Task[None]:
    """Return the task of `work`, whose failure is logged as `failed` says."""
    task = asyncio.create_task(work, name=name)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(failed, error)

    task.add_done_callback(ended)
    return task


def _teller(planner: str | None, token: str | None) -> PlannerClient | None:
    """Return the client of the planner, if there is one. Raises ConfigError without a session token."""
    if planner is None:
        return None
    if token is None:
        raise ConfigError("--planner: the planner needs a session token; pass --token-file")
    return PlannerClient(planner, token)


def _report(event: str, **details: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvasir-router", description="Run the router and its gateway.")
    parser.add_argument("--deployment", type=Path, required=True, help="kvasir.yaml")
    parser.add_argument(
        "--token-file",
        type=Path,
        help="shared secret of sessions; by default worker.session_token_file of the spec",
    )
    parser.add_argument(
        "--tls-dir", type=Path, help="folder of certificates; by default what tls of the spec says"
    )
    parser.add_argument("--ray-address", help="host:port of the Ray head, for discovery: ray")
    parser.add_argument("--planner", help="host:port of the planner, where pools have scaling")
    parser.add_argument(
        "--no-fast-path",
        action="store_true",
        help="send every delta through the request machine, to measure or to exclude the fast path",
    )
    args = parser.parse_args(argv)
    try:
        deployment = with_tls_dir(load(args.deployment), args.tls_dir)
        configure_logging(deployment.telemetry.log_level)
        token = session_token(deployment.worker, args.token_file)
        status: int = uvloop.run(
            serve(deployment, token, args.ray_address, args.planner, fast_path=not args.no_fast_path)
        )
        return status
    except KvasirError as error:
        _report("failed", code=error.code, message=error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
