"""How a cell is chosen: by Kvasir's decision, as the nearest one, or in turn.

All of them know which cells are lost from the same views, and keep tenants with data residency in their area.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType

from kvasir_router.regions.choice import CellOffer, CellRequest, ChoiceRules, choose

OURS, NEAREST, ROUND_ROBIN, PRICED = "kvasir", "nearest only", "round robin", "kvasir with prices"
PRICES = ChoiceRules(price_s=2.0)
"""A dollar less for a million tokens is worth two seconds of TTFT."""

Select = Callable[[CellRequest, Sequence[CellOffer]], str | None]


def _usable(request: CellRequest, offers: Sequence[CellOffer]) -> list[CellOffer]:
    """Return the cells that may serve it, with ready workers if any has."""
    found = [
        each
        for each in offers
        if each.state.usable
        and each.cell not in request.avoid
        and (request.residency is None or each.cell in request.residency)
    ]
    return [each for each in found if each.report is not None and each.report.ready] or found


def _nearest() -> Select:
    def select(request: CellRequest, offers: Sequence[CellOffer]) -> str | None:
        usable = _usable(request, offers)
        return min(usable, key=lambda each: each.network_s).cell if usable else None

    return select


def _round_robin() -> Select:
    numbers = count()

    def select(request: CellRequest, offers: Sequence[CellOffer]) -> str | None:
        usable = sorted(_usable(request, offers), key=lambda each: each.cell)
        return usable[next(numbers) % len(usable)].cell if usable else None

    return select


def _kvasir(rules: ChoiceRules) -> Select:
    return lambda request, offers: choose(request, offers, rules).cell


SELECTIONS: Mapping[str, Callable[[], Select]] = MappingProxyType(
    {
        OURS: lambda: _kvasir(ChoiceRules()),
        PRICED: lambda: _kvasir(PRICES),
        NEAREST: _nearest,
        ROUND_ROBIN: _round_robin,
    }
)
"""A new selection by name."""
