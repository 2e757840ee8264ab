"""A worker's tiers below the device in a few words, for tables."""

from __future__ import annotations

from typing import Any

from kvasir.core.kv import Medium


def tiers_cell(load: dict[str, Any]) -> str:
    """Each tier with how full it is, where it has a bound; `!` marks one in trouble. "-" for none."""
    shown = []
    for tier in load.get("tiers") or ():
        capacity = tier.get("bytes_capacity", 0)
        full = f" {tier.get('bytes_used', 0) / capacity:.0%}" if capacity else ""
        shown.append(f"{_name(tier)}{full}{'!' if tier.get('trouble') else ''}")
    return ", ".join(shown) or "-"


def tier_troubles(load: dict[str, Any]) -> list[str]:
    """What is wrong with tiers, one line for each in trouble."""
    return [f"{_name(tier)}: {tier['trouble']}" for tier in load.get("tiers") or () if tier.get("trouble")]


def _name(tier: dict[str, Any]) -> str:
    return Medium(tier["medium"]).name.lower()
