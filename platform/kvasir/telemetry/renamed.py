"""Renamed metrics, which are exposed under the former name as well for one release.

Dashboards and alert rules outside this repository use the former names until they are updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

FORMER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "kvasir_router_accounting_consistent": "kvasir_router_books_balanced",
        "kvasir_pool_replicas_desired": "kvasir_pool_replicas_wished",
        "kvasir_pool_scaling_applied": "kvasir_pool_scaling_acting",
        "kvasir_planner_inactive_seconds": "kvasir_planner_silent_seconds",
        "kvasir_discovery_stale_seconds": "kvasir_discovery_blind_seconds",
        "kvasir_rate_limits_local_decisions": "kvasir_rate_limits_decided_alone",
        "kvasir_worker_kv_evaluated_requests": "kvasir_worker_kv_judged_requests",
    }
)
"""Maps the name of each renamed family to its former name, both without the counter suffix `_total`."""


class AliasingRegistry(CollectorRegistry):
    """A registry that exposes each family of FORMER_NAMES under both names."""

    def collect(self) -> Iterable[Metric]:
        """Yield all families, each renamed one followed by its alias."""
        for family in super().collect():
            yield family
            former = FORMER_NAMES.get(family.name)
            if former is not None:
                yield _alias(family, former)


def _alias(family: Metric, former: str) -> Metric:
    alias = copy(family)
    alias.name = former
    alias.documentation = f"Deprecated: use {family.name}. {family.documentation}"
    alias.samples = [
        Sample(former + sample.name.removeprefix(family.name), *sample[1:]) for sample in family.samples
    ]
    return alias
