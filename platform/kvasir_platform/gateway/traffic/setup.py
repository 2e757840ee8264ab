"""What a gateway needs to serve routes; nothing is made for a spec without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.config.spec.deployment import Deployment
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestPort, RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.traffic.choice import RouteTable, Shares, primary_models
from kvasir_platform.gateway.traffic.rollouts import CountedRequests, Rollouts
from kvasir_platform.gateway.traffic.shadows import Shadows


@dataclass(frozen=True, slots=True)
class TrafficParts:
    """The routes, and what makes copies for their shadows."""

    routes: RouteTable
    shadows: Shadows


def counted(router: RouterPort, rollouts: Rollouts | None) -> tuple[RequestPort, Shares]:
    """Return what takes the requests of a router in this process, and the shares of its canaries."""
    if rollouts is None:
        return router, dict
    return CountedRequests(router, rollouts), rollouts.shares


def traffic_parts(
    deployment: Deployment,
    models: ModelTable,
    router: RequestPort,
    shares: Shares,
    suffix: Callable[[], str],
    *,
    metrics: Metrics,
    clock: Clock,
) -> TrafficParts | None:
    """Return the parts of a deployment with routes, whose names `models` gets; None without any. `shares`
    returns the share of each canary, and `suffix` a short random string."""
    models.routes = primary_models(deployment.routes)
    if not deployment.routes:
        return None
    shadows = Shadows(deployment, models, router, metrics=metrics, clock=clock, suffix=suffix)
    return TrafficParts(RouteTable(deployment.routes, deployment.slo, shares), shadows)
