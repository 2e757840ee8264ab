"""Budgets of all cells together: what this cell tells the others of its tenants, and hears from them."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvasir.ports.clock import Clock
from kvasir_platform.gateway.costs.budgets import Budgets, OtherCellsSpent
from kvasir_router.regions.sharing.spending import MAX_TENANTS, CellSpending, OtherSpending, TenantSpent

log = logging.getLogger(__name__)


class CellBudgets:
    """The budgets of a cell with peers, as the `OtherCells` of its `budgets`; without any it does nothing.
    Call `tick` about once a second."""

    def __init__(self, others: Collection[str], budgets: Budgets | None, clock: Clock) -> None:
        self._budgets = budgets
        self._clock = clock
        self._others = OtherSpending(others, clock.now())
        self._foreign: set[str] = set()
        if budgets is not None:
            budgets.other_cells = self

    def spent(self, tenant: str, period: str) -> OtherCellsSpent:
        """See OtherCells."""
        found = self._others.of(tenant, period)
        return OtherCellsSpent(found.amount, found.assumed, self._others.silent() if found.assumed else ())

    def said(self) -> CellSpending | None:
        """Return what to tell the others; None if no tenant has a budget."""
        if self._budgets is None:
            return None
        here = self._budgets.here().items()
        spent = [TenantSpent(tenant, period, max(0.0, amount)) for (tenant, period), amount in here]
        return CellSpending(self._budgets.currency, tuple(spent[:MAX_TENANTS]))

    def heard(self, cell: str, said: CellSpending) -> None:
        """Take what another cell says. Amounts in another currency are not counted."""
        if self._budgets is None:
            return
        if said.currency != self._budgets.currency:
            if cell not in self._foreign:
                self._foreign.add(cell)
                log.error(
                    "cell %s has costs in %s, and this one in %s: budgets do not count them; set one "
                    "cost.currency in all cells",
                    cell,
                    said.currency,
                    self._budgets.currency,
                )
            return
        amounts = {(each.tenant, each.period): each.amount for each in said.spent}
        self._others.heard(cell, amounts, self._clock.now())

    def tick(self) -> None:
        """Let time pass, and compute all states anew."""
        if self._budgets is not None:
            self._others.advance(self._budgets.here(), self._clock.now())
            self._budgets.recount()
