"""What a router shows of the cells."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.ports.router import CellModelView, CellView
from kvasir_platform.regions.dispatch import CellDispatch
from kvasir_platform.regions.peer import PeerCell
from kvasir_platform.regions.serving import CellServing
from kvasir_router.regions.reports import CellReport
from kvasir_router.regions.view import RegionView

HERE = "here"
UNREACHABLE = "unreachable"


def cell_views(
    dispatch: CellDispatch,
    peers: Mapping[str, PeerCell],
    view: RegionView,
    serving: CellServing,
    now: float,
    *,
    failures: int,
) -> list[CellView]:
    """Return this cell, then the others in the order of the spec. `failures` are those of this cell."""
    home = dispatch.home
    own = CellView(
        home,
        HERE,
        network_s=0.0,
        models=_models(dispatch.own_report()),
        sent=_sent(dispatch, home),
        received=serving.in_flight,
        failures=failures,
    )
    return [own, *(_other(dispatch, peer, view, now) for peer in peers.values())]


def _other(dispatch: CellDispatch, peer: PeerCell, view: RegionView, now: float) -> CellView:
    report = view.report(peer.name)
    return CellView(
        peer.name,
        UNREACHABLE if peer.why else str(view.state(peer.name, now)),
        reason=peer.why or view.reason(peer.name, now),
        age_s=None if report is None else view.age_s(peer.name, now),
        network_s=peer.network_s,
        models=() if report is None else _models(report),
        draining=report is not None and report.draining,
        in_flight=peer.in_flight,
        sent=_sent(dispatch, peer.name),
        lost=dispatch.losses[peer.name],
    )


def _sent(dispatch: CellDispatch, cell: str) -> dict[str, int]:
    return {reason: count for (name, reason), count in dispatch.counts.items() if name == cell}


def _models(report: CellReport) -> tuple[CellModelView, ...]:
    return tuple(
        CellModelView(
            each.model,
            each.revision,
            each.ready,
            each.queue_s,
            each.kv_free_tokens,
            each.prefill_tokens_per_s,
            each.dollars_per_mtok,
        )
        for each in report.models
    )
