"""Operator pages of the whole deployment, served by the process of the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.config.spec.deployment import Deployment
from kvasir.ports.clock import Clock
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.operator.adapters import AdapterPages
from kvasir_platform.gateway.operator.costs_page import CostPages
from kvasir_platform.gateway.operator.decisions import DecisionPages
from kvasir_platform.gateway.operator.drains import DrainPages
from kvasir_platform.gateway.operator.prefixes_page import PrefixPages
from kvasir_platform.gateway.operator.recordings import RecordingPages
from kvasir_platform.gateway.operator.requests_page import RequestPages
from kvasir_platform.gateway.operator.rollouts_page import RolloutPages
from kvasir_platform.gateway.operator.status_page import StatusPages
from kvasir_platform.gateway.serving.remote_core import RemoteCore
from kvasir_platform.gateway.serving.request_names import RequestNames
from kvasir_platform.gateway.traffic.rollouts import Rollouts

Show = Callable[[Exchange], None]
"""Responds to an exchange, or raises KvasirError."""


@dataclass(frozen=True, slots=True)
class OperatorPages:
    """One handler per page. `names` maps the calls that `decision` looks up."""

    names: RequestNames
    metrics: Show
    status: Show
    decision: Show
    drain: Show
    undrain: Show
    adapters: Show
    recording: Show
    requests: Show
    prefixes: Show
    rollouts: Show
    costs: Show


def operators_here(
    deployment: Deployment,
    models: ModelTable,
    router: RouterPort,
    metrics: Metrics,
    clock: Clock,
    *,
    in_flight: Callable[[], int],
    draining: Callable[[], bool],
    rollouts: Rollouts | None = None,
    costs: CostKeeper | None = None,
) -> OperatorPages:
    """Return the pages of a router in this process; see StatusPages."""
    names = RequestNames(deployment.routing.decision_records)
    status = StatusPages(
        deployment,
        models.listed,
        router,
        metrics,
        clock,
        in_flight=in_flight,
        draining=draining,
        rollouts=rollouts,
    )
    decisions = DecisionPages(router, names, None if costs is None else costs.ledger)
    drains = DrainPages(router)
    return OperatorPages(
        names,
        status.metrics,
        status.status,
        decisions.decision,
        drains.drain,
        drains.undrain,
        AdapterPages(router.adapters).serve,
        RecordingPages(router.recordings).read,
        RequestPages(router, clock).requests,
        PrefixPages(router).prefixes,
        RolloutPages(rollouts).serve,
        CostPages(costs).costs,
    )


def remote_operators(core: RemoteCore) -> OperatorPages:
    """Return the pages of a router in another process, which serves all of them."""
    show = core.show
    return OperatorPages(core.names, *[show] * 11)
