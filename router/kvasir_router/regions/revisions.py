"""Which cell takes a new revision next, and when all go back.

In each cell the revision is the canary of a route, whose share grows and which is judged there by evidence
(see the rollouts of the gateway). Among the cells there is an order: one takes the revision after the other,
so that what is wrong with it is seen in one. The plan follows from the phases that cells report, and from
nothing that was planned before: who evaluates it may change, and an order that was lost is given again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Phase = Literal["idle", "running", "paused", "promoted", "rolled_back"]
"""Phases of a canary in a cell."""
CellAction = Literal["start", "abort", "undo"]


@dataclass(frozen=True, slots=True)
class CellPhase:
    """Where a cell is with the revision, since `for_s` seconds. `reachable`: it is known well enough to get
    an order. `reason` is that of its own rollout."""

    phase: Phase = "idle"
    for_s: float = 0.0
    reachable: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RevisionRules:
    """`order` lists all cells. A promoted revision serves for `soak_s` in a cell before the next one takes
    it, and `at_once` cells take it at a time. With `undo`, a rollback in one cell takes it back in all."""

    order: tuple[str, ...]
    soak_s: float = 900.0
    at_once: int = 1
    undo: bool = True

    def __post_init__(self) -> None:
        if len(set(self.order)) != len(self.order) or not self.order:
            raise ValueError("order lists each cell once")
        if self.soak_s < 0 or self.at_once < 1:
            raise ValueError("soak_s is not negative, and at_once is at least 1")


class PlanState(StrEnum):
    """Where the whole is: WAITING for a cell, HALTED until an operator decides, GOING_BACK, BACK, or DONE."""

    WAITING = "waiting"
    HALTED = "halted"
    GOING_BACK = "going_back"
    BACK = "back"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class CellOrder:
    """What a cell is told to do with the revision."""

    cell: str
    action: CellAction


@dataclass(frozen=True, slots=True)
class RevisionPlan:
    """The orders of this moment, and why there are no others."""

    state: PlanState
    orders: tuple[CellOrder, ...] = ()
    reason: str = ""


def plan_revision(rules: RevisionRules, cells: Mapping[str, CellPhase]) -> RevisionPlan:
    """Return what to do. A cell of the order without a phase counts as one that cannot be reached."""
    known = [(name, cells.get(name, CellPhase(reachable=False))) for name in rules.order]
    rolled_back = [(name, each) for name, each in known if each.phase == "rolled_back"]
    if rolled_back:
        # The first one was judged; later ones followed it.
        return _back(rules, known, *max(rolled_back, key=lambda entry: entry[1].for_s))
    for name, each in known:
        if each.phase == "paused":
            return RevisionPlan(PlanState.HALTED, reason=f"paused in {name}: {each.reason}")
    if all(each.phase == "promoted" for _, each in known):
        return RevisionPlan(PlanState.DONE)
    return _forward(rules, known)


def _back(
    rules: RevisionRules, known: Sequence[tuple[str, CellPhase]], judge: str, judged: CellPhase
) -> RevisionPlan:
    """One cell has rolled back: none begins, and with `undo` the others go back as well."""
    reason = f"rolled back in {judge}: {judged.reason}"
    if not rules.undo:
        return RevisionPlan(PlanState.HALTED, reason=reason)
    actions: dict[Phase, CellAction] = {"running": "abort", "paused": "abort", "promoted": "undo"}
    # One that cannot be reached may serve the revision, whatever was known of it.
    left = [(name, each) for name, each in known if each.phase in actions or not each.reachable]
    orders = tuple(CellOrder(name, actions[each.phase]) for name, each in left if each.reachable)
    return RevisionPlan(PlanState.GOING_BACK if left else PlanState.BACK, orders, reason)


def _forward(rules: RevisionRules, known: Sequence[tuple[str, CellPhase]]) -> RevisionPlan:
    away = [name for name, each in known if not each.reachable]
    if away:
        # The cells that are left carry its load: not a moment to change them.
        return RevisionPlan(PlanState.WAITING, reason=f"not reachable: {', '.join(away)}")
    running = [name for name, each in known if each.phase == "running"]
    soaking = [name for name, each in known if each.phase == "promoted" and each.for_s < rules.soak_s]
    free = rules.at_once - len(running) - len(soaking)
    idle = [name for name, each in known if each.phase == "idle"]
    if free > 0 and idle:
        return RevisionPlan(PlanState.WAITING, tuple(CellOrder(name, "start") for name in idle[:free]))
    parts = [f"running in {', '.join(running)}"] if running else []
    parts += [f"serves for less than {rules.soak_s:g} s in {', '.join(soaking)}"] if soaking else []
    return RevisionPlan(PlanState.WAITING, reason="; ".join(parts))
