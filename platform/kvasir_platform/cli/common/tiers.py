"""A worker's tiers below the device, formatted for tables."""

from __future__ import annotations

from typing import Any

from kvasir.core.kv import Medium


def tiers_cell(load: dict[str, Any]) -> str:
    """Return each tier with its utilization, if it is bounded; `!` marks a failing one. "-" for none."""
    shown = []
    for tier in load.get("tiers") or ():
        capacity = tier.get("bytes_capacity", 0)
        full = f" {tier.get('bytes_used', 0) / capacity:.0%}" if capacity else ""
        shown.append(f"{_name(tier)}{full}{'!' if tier.get('trouble') else ''}")
    return ", ".join(shown) or "-"


def tier_troubles(load: dict[str, Any]) -> list[str]:
    """Return one line for each failing tier."""
    return [f"{_name(tier)}: {tier['trouble']}" for tier in load.get("tiers") or () if tier.get("trouble")]


def _name(tier: dict[str, Any]) -> str:
    return Medium(tier["medium"]).name.lower()
