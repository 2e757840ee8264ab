"""What a cell tells others of its tenants' budgets, and takes from them."""

from __future__ import annotations

import pytest
from tests.kit.clocks import StillClock

from kvasir.config.spec.tenants import BudgetSpec, TenantSpec
from kvasir_platform.gateway.costs.budgets import Budgets, Spending
from kvasir_platform.regions.sharing.budgets import CellBudgets
from kvasir_router.regions.sharing.spending import CellSpending, TenantSpent

MONTH = "1970-01"
SPEC = TenantSpec(name="lab", budget=BudgetSpec(hard=10))


def budgets() -> Budgets:
    made = Budgets([SPEC], "EUR", lambda: 0.0)
    spending = Spending(lambda: 0.0)
    spending.update({0: {"lab": 4.0, "other": 5.0}})
    made.refresh(spending)
    return made


def test_a_cell_says_what_tenants_with_a_budget_have_cost() -> None:
    cell = CellBudgets(["us"], budgets(), StillClock())
    assert cell.said() == CellSpending("EUR", (TenantSpent("lab", MONTH, 4.0),))


def test_a_cell_counts_what_it_hears() -> None:
    mine = budgets()
    cell = CellBudgets(["us"], mine, StillClock())
    cell.heard("us", CellSpending("EUR", (TenantSpent("lab", MONTH, 7.0), TenantSpent("x", MONTH, 9.0))))
    cell.tick()
    state = mine.reached("lab")
    assert state is not None
    assert (state.spent, state.over_hard) == (11.0, True)


def test_costs_in_another_currency_are_not_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = budgets()
    cell = CellBudgets(["us"], mine, StillClock())
    for _ in range(2):
        cell.heard("us", CellSpending("USD", (TenantSpent("lab", MONTH, 7.0),)))
    cell.tick()
    assert mine.reached("lab") is None
    (record,) = caplog.records
    assert "cell us has costs in USD, and this one in EUR" in record.message


def test_without_budgets_nothing_is_said_or_heard() -> None:
    cell = CellBudgets(["us"], None, StillClock())
    cell.heard("us", CellSpending("EUR", (TenantSpent("lab", MONTH, 7.0),)))
    cell.tick()
    assert cell.said() is None
