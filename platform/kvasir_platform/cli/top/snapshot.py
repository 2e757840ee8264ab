"""What `kvasir top` shows, as read from a gateway at one moment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir_platform.cli.common.gateway_client import metrics_of, requests_of, status_of
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.edge.exposition import Families, parse

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TENANT = "kvasir_tenant_"
Page = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """The counters of one tenant since its routers began, and its running requests."""

    running: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True, slots=True)
class TopSnapshot:
    """The pages /status and /requests as JSON, tenants from /metrics, and when they were read on a monotonic
    clock."""

    taken_s: float
    status: Page
    requests: Page
    tenants: Mapping[str, TenantCounts] = field(default_factory=dict)


def read_snapshot(site: Site, now_s: float) -> TopSnapshot:
    """Read the pages of a gateway. Raises the errors of the gateway client."""
    status, requests = status_of(site), requests_of(site)
    return TopSnapshot(now_s, status, requests, tenants_in(parse(metrics_of(site))))


def tenants_in(families: Families) -> dict[str, TenantCounts]:
    """Return the counts of each tenant in an exposition, which sums those of all edges."""
    sums: dict[str, dict[str, float]] = {}
    for name, family in families.items():
        if name.startswith(_TENANT):
            for series, value in family.series.items():
                labels = dict(_LABEL.findall(series))
                kind = name.removeprefix(_TENANT).removesuffix("_total")
                key = f"{labels['kind']}_tokens" if kind == "tokens" else kind
                counts = sums.setdefault(labels["tenant"], {})
                counts[key] = counts.get(key, 0.0) + value
    return {
        tenant: TenantCounts(
            counts.get("requests_in_flight", 0.0),
            counts.get("requests", 0.0),
            counts.get("prompt_tokens", 0.0),
            counts.get("output_tokens", 0.0),
            counts.get("refused", 0.0),
        )
        for tenant, counts in sums.items()
    }
