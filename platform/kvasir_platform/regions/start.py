"""Builds the router over several cells from the deployment spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.media.served import MediaInputs
from kvasir.config.spec.traffic.regions import PeerCellSpec, RegionsSpec
from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir.ports.limits import Quota
from kvasir.ports.router import RouterPort
from kvasir_platform.gateway.costs.budgets import Budgets
from kvasir_platform.regions.connections import CellDialer, OnCell
from kvasir_platform.regions.dispatch import CellDispatch
from kvasir_platform.regions.frames import VERSION, CellHello
from kvasir_platform.regions.grpc_cells import CellTls, GrpcCellDialer, GrpcCellServer
from kvasir_platform.regions.needs.features import Features
from kvasir_platform.regions.peer import PeerCell
from kvasir_platform.regions.reporting import OwnReports
from kvasir_platform.regions.residency import Residency
from kvasir_platform.regions.router import CellParts, RegionRouter
from kvasir_platform.regions.serving import CellListener, CellServing
from kvasir_platform.regions.session import ServingParts
from kvasir_platform.regions.sharing.asks import LimitAsk, TenantSlotAsk
from kvasir_platform.regions.sharing.budgets import CellBudgets
from kvasir_platform.regions.sharing.limits import CellLimits
from kvasir_router.regions.choice import ChoiceRules
from kvasir_router.regions.reports import INTERVAL_S, CellReport
from kvasir_router.regions.view import RegionView, ViewRules

MakeDialer = Callable[[PeerCellSpec], CellDialer]
MakeListener = Callable[[OnCell], CellListener]


def over_grpc(spec: RegionsSpec, tls: CellTls | None) -> tuple[MakeDialer, MakeListener]:
    """Return what connects to other cells, and what listens for them."""
    peers = [peer.certified_as for peer in spec.peers]
    return (
        lambda peer: GrpcCellDialer(peer.address, peer.certified_as, tls),
        lambda on_cell: GrpcCellServer(on_cell, bind=spec.listen, peers=peers, tls=tls),
    )


def make_region_router(
    deployment: Deployment,
    router: RouterPort,
    clock: Clock,
    *,
    dialer: MakeDialer,
    listener: MakeListener,
    router_id: str,
    tokenizers: Mapping[str, str],
    epoch: int,
    budgets: Budgets | None = None,
    media: Mapping[str, MediaInputs] | None = None,
) -> RegionRouter:
    """Return a router over the cells of `deployment`, of which `router` is this one. `tokenizers` has the
    digest of each model's tokenizer, and `epoch` grows with each start of the process. `budgets` become those
    of all cells, and `media` has what each model makes of media, if it takes any. Raise ConfigError without
    `regions` in the spec."""
    spec = deployment.regions
    if spec is None:
        raise ConfigError("regions: the spec has none")
    residency = Residency(spec.residency)
    features = Features(deployment, media or {})
    own = OwnReports(spec.name, router, clock, epoch=epoch, price=spec.price, features=features)
    view = RegionView([peer.name for peer in spec.peers], _view_rules(spec.stale_after_s))

    def heard(report: CellReport) -> None:
        view.heard(report, clock.now())

    def ask(cell: str, ask: LimitAsk | TenantSlotAsk) -> bool:
        return peers[cell].ask(ask)

    limits = CellLimits(
        spec.name,
        [spec.name, *(peer.name for peer in spec.peers)],
        _quotas(deployment),
        clock,
        ask=ask,
        epoch=epoch,
        router=router_id if deployment.tenancy.redis is not None else "",
    )
    spending = CellBudgets([peer.name for peer in spec.peers], budgets, clock)
    peers = _peers(spec, dialer, clock, router_id, heard=heard, limits=limits, spending=spending)
    parts = ServingParts(
        cell=spec.name,
        router=router,
        clock=clock,
        residency=residency,
        report=own.encoded,
        spending=spending.said,
        allot=limits.allot,
        grant=limits.grant,
        cells={peer.name: peer.certified_as for peer in spec.peers},
        tokenizers=tokenizers,
        lease_s=spec.lost_after_s,
        max_requests=spec.max_forwarded,
    )
    serving = CellServing(parts)
    serving.listen(listener(serving.serve))
    dispatch = CellDispatch(
        spec.name,
        router,
        peers,
        view=view,
        own=own,
        clock=clock,
        residency=residency,
        rules=ChoiceRules(spec.spill_margin_s, spec.price_weight_s),
        tokenizers=tokenizers,
        features=features,
        default_output=deployment.gateway.default_max_tokens,
    )
    return RegionRouter(
        CellParts(router, dispatch, peers, serving, limits, spending, own, view),
        clock,
        lease_s=spec.lost_after_s,
    )


def _peers(
    spec: RegionsSpec,
    dialer: MakeDialer,
    clock: Clock,
    router_id: str,
    *,
    heard: Callable[[CellReport], None],
    limits: CellLimits,
    spending: CellBudgets,
) -> dict[str, PeerCell]:
    hello = CellHello(VERSION, spec.name, router_id)
    return {
        peer.name: PeerCell(
            peer.name,
            hello,
            dialer(peer),
            clock,
            lease_s=spec.lost_after_s,
            max_requests=spec.max_forwarded,
            on_report=heard,
            on_allotted=limits.answered,
            on_slots=limits.granted,
            on_spending=spending.heard,
            network_s=peer.network_s,
        )
        for peer in spec.peers
    }


def _quotas(deployment: Deployment) -> dict[str, Quota]:
    """Return what tenants may use in all cells together."""
    quotas = {
        tenant.name: Quota(tenant.requests_per_min, tenant.tokens_per_min, tenant.concurrency)
        for tenant in deployment.tenancy.all_tenants()
    }
    return {name: quota for name, quota in quotas.items() if not quota.uncounted}


def _view_rules(stale_s: float) -> ViewRules:
    usual = ViewRules()
    return ViewRules(stale_s=stale_s, lost_s=max(usual.lost_s, stale_s + INTERVAL_S))
