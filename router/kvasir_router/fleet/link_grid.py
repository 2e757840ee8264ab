"""The class of the link between each pair of places of the fleet.

Decisions look classes up in this grid, because deriving them from names would take longer than the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvasir.core.locality import LinkClass, Locality
from kvasir.ports.routing import BoolColumn, IntColumn, LinkGrid

_UNKNOWN = -1


def link_grid(localities: Sequence[Locality], workers: IntColumn) -> LinkGrid | None:
    """Return the classes, equal to those of kvasir.core.locality.link_class, with a row and a column for each
    place; `workers` numbers the worker of each. None if nothing is known of any two workers."""
    if not any(each.node or each.zone or each.rack or each.nvlink_domain for each in localities):
        return None
    nodes, zones, racks, domains = (
        _numbers(getattr(each, name) for each in localities)
        for name in ("node", "zone", "rack", "nvlink_domain")
    )
    grid: LinkGrid = np.full((len(localities),) * 2, LinkClass.UNKNOWN, dtype=np.uint8)
    known = zones != _UNKNOWN
    # From far to near: the nearest name that two places share decides.
    grid[_same(zones)] = LinkClass.ZONE
    grid[_same(racks)] = LinkClass.RACK
    grid[known[:, None] & known & (zones[:, None] != zones)] = LinkClass.CROSS_ZONE
    grid[_same(nodes)] = LinkClass.NODE
    grid[_same(domains)] = LinkClass.NVLINK
    between_workers = grid[workers[:, None] != workers]
    return grid if (between_workers != LinkClass.UNKNOWN).any() else None


def _numbers(names: Iterable[str]) -> IntColumn:
    """Return a number for each distinct name."""
    numbers = {"": _UNKNOWN}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)


def _same(numbers: IntColumn) -> BoolColumn:
    same: BoolColumn = (numbers[:, None] == numbers) & (numbers != _UNKNOWN)
    return same
