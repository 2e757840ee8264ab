"""Limits that three cells share over their links, in virtual time: concurrency and budgets, also while a cell
is cut off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from tests.kit.sim.cells import SimCell, SimCells
from tests.simulation.test_cell_losses import DELAYS, cell

from kvasir.config.spec.tenants import BudgetSpec, TenancySpec, TenantSpec
from kvasir.ports.limits import Grant, LimitRefusal, Quota
from kvasir.ports.stores.costs import HOUR_S
from kvasir_platform.gateway.costs.budgets import BudgetPeriod, Budgets, Spending, within_budgets
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits
from kvasir_platform.regions.sharing.limits import home_of
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_router.regions.sharing.slots import part_of, slots_overshoot
from kvasir_router.regions.sharing.spending import SILENT_S

NAMES = ("ap", "eu", "us")
MOST = 7
TENANT = next(name for name in (f"t{i}" for i in range(100)) if home_of(name, NAMES) == "eu")
NOON_S = datetime(2030, 1, 10, 12, tzinfo=UTC).timestamp()
SPEC = TenantSpec(name=TENANT, concurrency=MOST, budget=BudgetSpec(period="month", soft=60, hard=90))


def played(story: Callable[[SimCells], Awaitable[None]]) -> None:
    """Play a story with three cells whose tenant has limits and a budget."""

    async def main() -> None:
        clock = VirtualClock()
        spec = cell().model_copy(update={"tenancy": TenancySpec(tenants=(SPEC,))})

        def budgets() -> Budgets:
            return Budgets([SPEC], "EUR", lambda: NOON_S)

        async with SimCells(spec, clock, DELAYS, budgets=budgets) as cells:
            await story(cells)

    run_virtual(main())


class Calls:
    """Calls of the tenant in all cells, and how many have been granted and run."""

    def __init__(self, cells: SimCells) -> None:
        self.limits = {name: cells[name].router.limits(MemoryLimits(cells.clock.now)) for name in NAMES}
        self.running: Counter[str] = Counter()
        self.refused: list[LimitRefusal] = []

    def take(self, name: str, count: int) -> None:
        """Calls in a cell, which run until the test ends."""

        def answered(verdict: Grant | LimitRefusal) -> None:
            if isinstance(verdict, Grant):
                self.running[name] += 1
            else:
                self.refused.append(verdict)

        for _ in range(count):
            self.limits[name].take(TENANT, Quota(concurrency=MOST), 10, answered)


def test_calls_of_all_cells_share_the_slots_of_a_tenant() -> None:
    async def story(cells: SimCells) -> None:
        calls = Calls(cells)
        for _ in range(5):
            for name in NAMES:
                calls.take(name, 4)
            await cells.clock.sleep(1.0)
        assert calls.running.total() == MOST
        assert min(calls.running[name] for name in NAMES) >= 1
        assert {refusal.limit for refusal in calls.refused} == {"concurrency"}

    played(story)


def test_a_cell_that_is_cut_off_goes_beyond_the_limit_by_no_more_than_the_bound() -> None:
    async def story(cells: SimCells) -> None:
        calls = Calls(cells)
        calls.take("us", MOST)
        await cells.clock.sleep(1.0)
        assert calls.running == {"us": MOST}
        cells.links.cut("us", "ap")
        for _ in range(15):
            for name in NAMES:
                calls.take(name, MOST)
            await cells.clock.sleep(1.0)
        assert calls.running == {"us": MOST, "eu": MOST, "ap": part_of(MOST, 3)}
        assert calls.running.total() == MOST + slots_overshoot(MOST, 3, 2)

    played(story)


def spend(site: SimCell, amount: float) -> None:
    """Have the tenant cost this much in a cell in all."""
    assert site.budgets is not None
    spending = Spending(lambda: NOON_S)
    spending.update({int(NOON_S) // HOUR_S * HOUR_S: {TENANT: amount}})
    site.budgets.refresh(spending)


def verdict_in(site: SimCell) -> Grant | LimitRefusal:
    answers: list[Grant | LimitRefusal] = []
    limits = within_budgets(MemoryLimits(lambda: 0.0), site.budgets)
    limits.take(TENANT, Quota(budget=True), 5, answers.append)
    return answers[0]


def test_a_budget_is_of_all_cells_together() -> None:
    async def story(cells: SimCells) -> None:
        for name in NAMES:
            spend(cells[name], 25.0)
        alone = verdict_in(cells["eu"])
        assert isinstance(alone, Grant)
        assert alone.budget == ""
        await cells.clock.sleep(2.5)
        near = verdict_in(cells["eu"])
        assert isinstance(near, Grant)
        assert near.budget.startswith("EUR 75.00 spent in 2030-01 (50.00 in other cells) of soft 60.00")
        spend(cells["us"], 45.0)
        await cells.clock.sleep(2.5)
        spent = verdict_in(cells["eu"])
        assert isinstance(spent, LimitRefusal)
        assert (spent.limit, spent.retry_after_s) == (
            "budget",
            BudgetPeriod.at("month", NOON_S).end_s - NOON_S,
        )
        assert "EUR 95.00 spent in 2030-01 (70.00 in other cells)" in spent.budget

    played(story)


def test_a_cell_that_is_cut_off_spends_its_part_of_what_is_left() -> None:
    async def story(cells: SimCells) -> None:
        spend(cells["eu"], 30.0)
        await cells.clock.sleep(2.5)
        cells.links.cut("us")
        await cells.clock.sleep(SILENT_S + 2.0)
        amounts = {"us": 0.0, "eu": 30.0, "ap": 0.0}
        for _ in range(100):
            for name in NAMES:
                if isinstance(verdict_in(cells[name]), Grant):
                    amounts[name] += 1.0
                    spend(cells[name], amounts[name])
            await cells.clock.sleep(1.5)
        assert 20.0 <= amounts["us"] <= 22.0
        assert 90.0 <= sum(amounts.values()) <= 95.0
        refusal = verdict_in(cells["us"])
        assert isinstance(refusal, LimitRefusal)
        assert "assumed of ap, eu (not heard)" in refusal.budget
        cells.links.heal()
        await cells.clock.sleep(5.0)
        refusal = verdict_in(cells["us"])
        assert isinstance(refusal, LimitRefusal)
        assert "assumed" not in refusal.budget

    played(story)
