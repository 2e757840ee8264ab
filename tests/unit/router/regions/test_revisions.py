"""A new revision goes from cell to cell, and back from all of them if one finds it worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from kvasir.config.spec.traffic.routes import CanarySpec
from kvasir_platform.gateway.traffic.outcomes import CRITERIA
from kvasir_platform.gateway.traffic.rollout import RolloutState, decide, ordered
from kvasir_router.regions.revisions import (
    CellOrder,
    CellPhase,
    PlanState,
    RevisionPlan,
    RevisionRules,
    plan_revision,
)

CELLS = ("a", "b", "c")
RULES = RevisionRules(CELLS, soak_s=900.0)
IDLE, RUNNING, DONE = CellPhase(), CellPhase("running"), CellPhase("promoted", 1000.0)


def plan(*phases: CellPhase, rules: RevisionRules = RULES) -> RevisionPlan:
    return plan_revision(rules, dict(zip(CELLS, phases, strict=True)))


def test_the_first_cell_takes_it_alone() -> None:
    assert plan(IDLE, IDLE, IDLE).orders == (CellOrder("a", "start"),)
    assert plan(RUNNING, IDLE, IDLE) == RevisionPlan(PlanState.WAITING, reason="running in a")


def test_the_next_cell_takes_it_after_the_soak() -> None:
    soaking = replace(DONE, for_s=899.0)
    assert plan(soaking, IDLE, IDLE) == RevisionPlan(
        PlanState.WAITING, reason="serves for less than 900 s in a"
    )
    assert plan(DONE, IDLE, IDLE).orders == (CellOrder("b", "start"),)
    assert plan(DONE, DONE, DONE) == RevisionPlan(PlanState.DONE)


def test_several_cells_take_it_at_once_if_the_rules_say_so() -> None:
    two = replace(RULES, at_once=2)
    assert [each.cell for each in plan(IDLE, IDLE, IDLE, rules=two).orders] == ["a", "b"]
    assert [each.cell for each in plan(RUNNING, IDLE, IDLE, rules=two).orders] == ["b"]


def test_a_rollback_in_one_cell_takes_it_back_in_all() -> None:
    worse = CellPhase("rolled_back", reason="its time to first token is longer")
    found = plan(DONE, worse, RUNNING)
    assert found.state is PlanState.GOING_BACK
    assert found.orders == (CellOrder("a", "undo"), CellOrder("c", "abort"))
    assert "rolled back in b: its time to first token is longer" in found.reason
    assert plan(worse, worse, IDLE).state is PlanState.BACK


def test_without_undo_a_rollback_halts_the_rest() -> None:
    found = plan(DONE, CellPhase("rolled_back"), IDLE, rules=replace(RULES, undo=False))
    assert (found.state, found.orders) == (PlanState.HALTED, ())


def test_a_cell_that_cannot_be_reached_goes_back_when_it_can() -> None:
    away = replace(DONE, reachable=False)
    worse = CellPhase("rolled_back")
    assert plan(away, worse, IDLE) == RevisionPlan(PlanState.GOING_BACK, (), "rolled back in b: ")
    assert plan(DONE, worse, IDLE).orders == (CellOrder("a", "undo"),)
    assert plan(CellPhase(reachable=False), worse, IDLE).state is PlanState.GOING_BACK


def test_no_cell_begins_while_one_is_away_or_paused() -> None:
    assert plan(DONE, IDLE, replace(IDLE, reachable=False)).reason == "not reachable: c"
    assert plan_revision(RULES, {"a": DONE}).reason == "not reachable: b, c"
    paused = plan(DONE, CellPhase("paused", reason="undecided"), IDLE)
    assert (paused.state, paused.reason) == (PlanState.HALTED, "paused in b: undecided")


CANARY = CanarySpec(model="new", steps=(0.1, 0.5), step_s=100.0, min_requests=100)


def rolled_out(slower: Mapping[str, bool]) -> tuple[dict[str, RolloutState], list[CellOrder]]:
    """Drive the plan with the gateways' own judgement, ten seconds at a time. In a cell where the revision is
    slower, it loses two of three comparisons."""
    states = {cell: RolloutState() for cell in CELLS}
    compared = dict.fromkeys(CELLS, 0)
    orders = []
    for now in range(0, 20_000, 10):
        seen = {
            cell: CellPhase(state.phase, now - state.since_s, reason=state.reason)
            for cell, state in states.items()
        }
        for order in plan_revision(RULES, seen).orders:
            orders.append(order)
            states[order.cell] = ordered(states[order.cell], order.action, float(now))
        for cell, state in states.items():
            if state.compares:
                compared[cell] += 30
            worse = compared[cell] * 2 // 3 if slower.get(cell) else compared[cell] // 2
            counts = {f"{each}_worse": 0 for each in CRITERIA}
            counts |= {
                "ttft_worse": worse,
                "ttft_better": compared[cell] - worse,
                f"compared_{state.step}": 1000,
            }
            states[cell] = decide(CANARY, state, counts, float(now)) or state
    return states, orders


def test_an_equal_revision_is_promoted_cell_by_cell() -> None:
    states, orders = rolled_out({})
    assert {state.phase for state in states.values()} == {"promoted"}
    assert orders == [CellOrder(cell, "start") for cell in CELLS]
    begins = [states[cell].since_s for cell in CELLS]
    assert all(later - earlier >= RULES.soak_s for earlier, later in pairwise(begins))


def test_a_revision_that_is_slower_in_the_second_cell_goes_back_in_the_first() -> None:
    states, orders = rolled_out({"b": True})
    assert [states[cell].phase for cell in CELLS] == ["rolled_back", "rolled_back", "idle"]
    assert orders == [CellOrder("a", "start"), CellOrder("b", "start"), CellOrder("a", "undo")]
    assert "time to first token" in states["b"].reason


def test_an_order_lists_each_cell_once() -> None:
    with pytest.raises(ValueError, match="each cell once"):
        RevisionRules(("a", "a"))
