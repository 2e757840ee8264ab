"""What `kvasir check` says of cells in other regions: what this one needs so that they use it."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.config.spec.deployment import Deployment, is_loopback
from kvasir_platform.cluster.preflight.finding import Finding


def region_findings(deployment: Deployment) -> Iterator[Finding]:
    """Yield what is missing, or not as one may expect."""
    spec, tls = deployment.regions, deployment.tls
    if spec is None:
        return
    exposed = [host for host in spec.hosts if not is_loopback(host)]
    if exposed and not tls.named:
        yield Finding(
            "regions",
            "error",
            f"{exposed[0]} is on the network, and no certificate is named: those that `kvasir up` makes are "
            "of an authority that other cells do not know",
            "set tls.directory, with certificates of one authority for all cells (docs/REGIONS.md)",
        )
    if not spec.peers:
        yield Finding(
            "regions",
            "warning",
            f"cell {spec.name} has no peers, so that its requests run in no other cell",
            "list the other cells in regions.peers, and this one in theirs",
        )
    limited = [
        tenant.name
        for tenant in deployment.tenancy.tenants
        if tenant.requests_per_min or tenant.tokens_per_min
    ]
    if limited and deployment.tenancy.redis is not None:
        yield Finding(
            "regions",
            "warning",
            f"limits of {limited[0]} are shared by the routers of this cell in Redis, and not with other "
            "cells",
            "run one router in each cell without tenancy.redis, or divide the limits among the cells",
        )
