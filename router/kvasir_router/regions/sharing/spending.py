"""What tenants have spent in other cells, for budgets that are of all cells together.

Each cell says once a second what the tenants with a budget have cost in it so far, and adds up what it hears.
A cell that has been silent for a while counts with what it said last, and with as much as each of the other
cells has spent since on average.

The bound. Let H be a hard budget, R what is left of it as cells lose each other, n their number, and D the
time in which a cell hears what another one has spent. A cell that hears g cells, itself included, stops once
they have spent R g / n since; groups of cells that stay apart therefore spend at most R together. Beyond H a
tenant spends at most what its requests cost in D in all cells, and those that run as it is reached. A cell
that spends nothing while it is lost has a part of the budget wait for it: until it returns, or the budget is
renewed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec

SILENT_S = 5.0
"""A cell that has said nothing for this long counts as one that spends as others do."""
MAX_TENANTS = 1024

Period = tuple[str, str]
"""A tenant, and a day or month such as 2030-01."""


class TenantSpent(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant has cost in one cell in a period."""

    tenant: Annotated[str, msgspec.Meta(max_length=253)]
    period: Annotated[str, msgspec.Meta(max_length=16)]
    amount: Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class CellSpending(msgspec.Struct, frozen=True, array_like=True):
    """What tenants with a budget have cost in one cell."""

    currency: Annotated[str, msgspec.Meta(max_length=3)]
    spent: Annotated[tuple[TenantSpent, ...], msgspec.Meta(max_length=MAX_TENANTS)] = ()


class SpentInOthers(NamedTuple):
    """What a tenant has spent in other cells. `assumed` of the `amount` is what silent cells may have spent
    since they were heard."""

    amount: float = 0.0
    assumed: float = 0.0


@dataclass(slots=True)
class _Cell:
    heard_s: float
    silent: bool = False
    known: bool = False
    amounts: Mapping[Period, float] = field(default_factory=dict)
    counted: Mapping[Period, float] = field(default_factory=dict)
    assumed: dict[Period, float] = field(default_factory=dict)


class OtherSpending:
    """What tenants have spent in the cells `others`, seen from one cell. Call `advance` about once a
    second."""

    def __init__(self, others: Collection[str], now: float, *, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._cells = {name: _Cell(now) for name in others}
        self._own: Mapping[Period, float] | None = None

    def heard(self, cell: str, amounts: Mapping[Period, float], now: float) -> None:
        """A cell says what its tenants have spent. Raises KeyError for an unknown one."""
        known = self._cells[cell]
        known.amounts, known.heard_s = amounts, now
        if not known.known:
            # What it spent before this cell started says nothing of what silent ones spend.
            known.known, known.counted = True, amounts

    def advance(self, own: Mapping[Period, float], now: float) -> None:
        """Let time pass. `own` has what all tenants with a budget have spent in this cell, in the periods
        that count."""
        heard = []
        for cell in self._cells.values():
            cell.silent = now - cell.heard_s > self._silent_s
            if not cell.silent:
                cell.assumed.clear()
                heard.append(cell)
        before = own if self._own is None else self._own
        self._own = dict(own)
        for key, amount in own.items():
            spent = amount - before.get(key, 0.0)
            spent += sum(cell.amounts.get(key, 0.0) - cell.counted.get(key, 0.0) for cell in heard)
            if spent > 0:
                for cell in self._cells.values():
                    if cell.silent:
                        cell.assumed[key] = cell.assumed.get(key, 0.0) + spent / (1 + len(heard))
        for cell in heard:
            cell.counted = cell.amounts
        for cell in self._cells.values():
            for key in cell.assumed.keys() - own.keys():
                del cell.assumed[key]

    def of(self, tenant: str, period: str) -> SpentInOthers:
        """Return what a tenant has spent in the other cells in a period."""
        key = (tenant, period)
        assumed = sum(cell.assumed.get(key, 0.0) for cell in self._cells.values())
        return SpentInOthers(
            assumed + sum(cell.amounts.get(key, 0.0) for cell in self._cells.values()), assumed
        )

    def silent(self) -> tuple[str, ...]:
        """Return the cells that are silent, by name."""
        return tuple(sorted(name for name, cell in self._cells.items() if cell.silent))
