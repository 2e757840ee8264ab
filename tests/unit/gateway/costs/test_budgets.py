"""Budgets: what a tenant has spent in a day or month, and what its requests hear of it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from tests.kit.gateway.edge_link import core_parts, linked
from tests.kit.gateway.scripted_router import ScriptedRouter

from kvasir.clock import MonotonicClock
from kvasir.config.spec.tenants import BudgetSpec, TenantSpec
from kvasir.ports.limits import Grant, LimitRefusal, Quota
from kvasir.ports.stores.costs import HOUR_S
from kvasir_platform.gateway.costs.budgets import (
    BudgetLimits,
    BudgetPeriod,
    Budgets,
    Spending,
    within_budgets,
)
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits

PATIENCE_S = 30.0


class Wall:
    def __init__(self, text: str) -> None:
        self.at = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.at


def hour(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) // HOUR_S * HOUR_S


def tenant(**budget: object) -> TenantSpec:
    return TenantSpec(name="lab", budget=BudgetSpec.model_validate(budget))


def taken(limits: BudgetLimits, quota: Quota) -> Grant | LimitRefusal:
    answers: list[Grant | LimitRefusal] = []
    limits.take("lab", quota, 5, answers.append)
    return answers[0]


@pytest.mark.parametrize(
    ("period", "at", "name", "days"),
    [
        ("day", "2030-02-28T23:59:59", "2030-02-28", 1),
        ("month", "2030-02-28T23:59:59", "2030-02", 28),
        ("month", "2028-02-29T00:00:00", "2028-02", 29),
        ("month", "2030-12-31T12:00:00", "2030-12", 31),
    ],
)
def test_a_period_is_a_calendar_day_or_month(period: str, at: str, name: str, days: int) -> None:
    found = BudgetPeriod.at(period, Wall(at)())
    assert (found.name, (found.end_s - found.begin_s) / 86_400) == (name, days)


def test_hours_that_are_over_are_kept_and_open_ones_are_replaced() -> None:
    wall = Wall("2030-01-10T12:30")
    spending = Spending(wall)
    assert spending.since() == hour("2030-01-01T00:00")
    spending.update({hour("2030-01-02T05:00"): {"lab": 4.0}, hour("2030-01-10T12:00"): {"lab": 1.0}})
    assert spending.since() == hour("2030-01-10T09:00")
    spending.update({hour("2030-01-10T12:00"): {"lab": 1.5}})
    month, day = (BudgetPeriod.at(period, wall()) for period in ("month", "day"))
    assert spending.of("lab", month) == 5.5
    assert spending.of("lab", day) == 1.5
    wall.at = Wall("2030-02-01T00:10")()
    spending.update({})
    assert spending.of("lab", BudgetPeriod.at("month", wall())) == 0.0


def test_a_spent_budget_refuses_until_its_period_ends() -> None:
    wall = Wall("2030-01-10T23:00")
    budgets = Budgets([tenant(period="day", hard=2.0)], "EUR", wall)
    spending = Spending(wall)
    limits = within_budgets(MemoryLimits(lambda: 0.0), budgets)
    assert isinstance(limits, BudgetLimits)
    quota = Quota(budget=True)
    assert isinstance(taken(limits, quota), Grant)
    spending.update({hour("2030-01-10T22:00"): {"lab": 2.0}})
    budgets.refresh(spending)
    refusal = taken(limits, quota)
    assert isinstance(refusal, LimitRefusal)
    assert (refusal.limit, refusal.retry_after_s) == ("budget", 3600.0)
    assert refusal.budget == "EUR 2.00 spent in 2030-01-10 of hard 2.00; renewed 2030-01-11T00:00Z"
    wall.at += 3600.0
    assert isinstance(taken(limits, quota), Grant)


def test_other_limits_of_a_tenant_with_a_budget_stay_in_force() -> None:
    wall = Wall("2030-01-10T23:00")
    budgets = Budgets([tenant(soft=1.0, hard=9.0)], "EUR", wall)
    spending = Spending(wall)
    spending.update({hour("2030-01-10T22:00"): {"lab": 2.0}})
    budgets.refresh(spending)
    limits = within_budgets(MemoryLimits(lambda: 0.0), budgets)
    assert isinstance(limits, BudgetLimits)
    quota = Quota(requests_per_min=1, budget=True)
    first, second = taken(limits, quota), taken(limits, quota)
    assert isinstance(first, Grant)
    assert first.budget.startswith("EUR 2.00 spent in 2030-01")
    assert isinstance(second, LimitRefusal)
    assert second.limit == "requests"


@pytest.mark.parametrize("budget", [{}, {"soft": 3.0, "hard": 2.0}])
def test_a_budget_that_makes_no_sense_is_refused(budget: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="budget"):
        BudgetSpec.model_validate(budget)


async def test_an_edge_hears_of_a_spent_budget_from_its_core() -> None:
    wall = Wall("2030-01-10T23:00")
    budgets = Budgets([tenant(period="day", hard=2.0)], "EUR", wall)
    spending = Spending(wall)
    spending.update({hour("2030-01-10T22:00"): {"lab": 2.5}})
    budgets.refresh(spending)
    limits = within_budgets(MemoryLimits(lambda: 0.0), budgets)
    core = core_parts(ScriptedRouter(MonotonicClock()), limits)
    async with linked(core) as each, asyncio.timeout(PATIENCE_S):
        heard: asyncio.Future[Grant | LimitRefusal] = asyncio.get_running_loop().create_future()
        each.link.limits.take("lab", Quota(budget=True), 5, heard.set_result)
        refusal = await heard
    assert isinstance(refusal, LimitRefusal)
    assert refusal.limit == "budget"
    assert refusal.budget.startswith("EUR 2.50 spent in 2030-01-10")
