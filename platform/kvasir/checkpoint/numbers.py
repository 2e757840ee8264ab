"""Counts in config.json, which may be absent, null or of another type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the number of layers."""
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in a layer."""


def positive(value: object) -> int:
    """Return a positive integer, 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def count(values: Mapping[str, Any], *names: str) -> int:
    """Return the first positive integer among `names`, 0 if there is none."""
    return next((found for name in names if (found := positive(values.get(name)))), 0)
