"""`kvasir rollout cells`: a route's canary in one cell after the other, and back from all of them.

Each cell judges its canary by itself. This command reads the phases that they show, asks the plan what
follows from them, and orders it. It keeps nothing: one that is stopped goes on where the cells are when it is
started again, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from kvasir.core.errors import RequestError, UpstreamError
from kvasir_platform.cli.common.gateway_client import order_rollout, rollouts
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_router.regions.revisions import (
    CellPhase,
    Phase,
    PlanState,
    RevisionPlan,
    RevisionRules,
    plan_revision,
)

_PHASES: Mapping[str, Phase] = {phase: phase for phase in get_args(Phase)}
_ENDS = (PlanState.DONE, PlanState.BACK, PlanState.HALTED)


@dataclass(frozen=True, slots=True)
class CellWatch:
    """Cells are read every `every_s` seconds; with `once`, only once. `pause` sleeps."""

    every_s: float
    once: bool
    pause: Callable[[float], None]


def roll_over_cells(
    route: str, cells: Mapping[str, Site], rules: RevisionRules, watch: CellWatch, output: CommandOutput
) -> int:
    """Follow the plan until it is done, back, or halted. Return 0 if all cells have the canary promoted, or,
    with `once`, are on the way there. Raises RequestError for a cell without such a route."""
    said = ""
    while True:
        phases = {name: _phase(name, site, route) for name, site in cells.items()}
        plan = plan_revision(rules, phases)
        failed = {order.cell: _order(cells[order.cell], route, order.action) for order in plan.orders}
        line = _line(plan, phases, failed)
        if line != said:
            output.text(line)
            said = line
        if watch.once or plan.state in _ENDS:
            output.data(_data(plan, phases))
            return int(plan.state not in (PlanState.DONE, PlanState.WAITING))
        watch.pause(watch.every_s)


def _phase(name: str, site: Site, route: str) -> CellPhase:
    try:
        found = rollouts(site)
    except UpstreamError as error:
        return CellPhase(reachable=False, reason=str(error))
    for each in found:
        if each.get("route") == route:
            phase = _PHASES.get(str(each.get("phase")))
            if phase is None:
                raise RequestError(f"{name}: {each.get('phase')!r} is no phase of a rollout known here")
            return CellPhase(phase, float(each.get("for_s") or 0.0), reason=str(each.get("reason") or ""))
    names = ", ".join(str(each.get("route")) for each in found) or "none"
    raise RequestError(
        f"{name} has no route {route!r} with a canary; there are: {names}", code="rollout_not_found"
    )


def _order(site: Site, route: str, action: str) -> str:
    """Order a cell; return why it did not take the order, "" if it did. The plan gives it again."""
    try:
        order_rollout(site, route, action)
    except (RequestError, UpstreamError) as error:
        return error.message
    return ""


def _line(plan: RevisionPlan, phases: Mapping[str, CellPhase], failed: Mapping[str, str]) -> str:
    orders = [
        f"{order.action} in {order.cell}" + (f" failed: {failed[order.cell]}" if failed[order.cell] else "")
        for order in plan.orders
    ]
    shown = ", ".join(f"{name} {_shown(phase)}" for name, phase in phases.items())
    return "; ".join(filter(None, (f"{plan.state.value}: {shown}", *orders, plan.reason)))


def _shown(phase: CellPhase) -> str:
    return phase.phase if phase.reachable else "not reachable"


def _data(plan: RevisionPlan, phases: Mapping[str, CellPhase]) -> dict[str, Any]:
    return {
        "state": plan.state.value,
        "reason": plan.reason,
        "orders": [{"cell": order.cell, "action": order.action} for order in plan.orders],
        "cells": {
            name: {"phase": phase.phase if phase.reachable else None, "for_s": phase.for_s}
            for name, phase in phases.items()
        },
    }
