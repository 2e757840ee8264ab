"""All scenarios, in the order in which `make reports` runs them: short ones first, so that what does not work
is seen early."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from load_tests.suite.scenario import Scenario
from load_tests.suite.tables import engines, faults, gateway, kv, routing

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        each.report: each
        for each in (
            gateway.EDGE,
            gateway.TOKENIZING,
            gateway.EDGE_LINK,
            gateway.BOUNDS,
            gateway.FRAMEWORKS,
            engines.FOUNDATION,
            routing.INDEX,
            kv.OVERLAP,
            kv.EVICTION,
            routing.REGIONS,
            faults.LOSSES,
            engines.PARITY,
            engines.TRUTH,
            engines.THREADS,
            faults.ALERTS,
            engines.SCALING,
            gateway.INSTRUCTIONS,
            engines.AGREEMENT,
            routing.SIMULATOR,
            gateway.WHOLE,
            kv.MOVED,
            gateway.PAIRED,
            routing.POLICIES,
            routing.AUTOSCALE,
            faults.SCORECARD,
            engines.MODELS,
        )
    }
)
"""By the name of the report."""
