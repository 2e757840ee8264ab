"""The routers that a recording reads, where a Kubernetes Service names them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from kvasir.core.errors import ConfigError


def service_addresses(service: str, address: str | None) -> tuple[str, ...]:
    """Return the address of each router behind a Service. Raises ConfigError outside of a cluster, with
    `address` given too, or without routers, and UpstreamError if the API server does not say."""
    if address is not None:
        raise ConfigError(
            "--service names all routers; leave out --address, or name further ones with --router"
        )
    # The Kubernetes client costs half a second.
    from kvasir.config.spec.cluster import KubernetesDiscoverySpec
    from kvasir_platform.cluster.kubernetes.access import Access
    from kvasir_platform.cluster.kubernetes.routers import router_addresses

    try:
        access = Access.in_cluster(Path(KubernetesDiscoverySpec().credentials_dir), os.environ)
    except ConfigError as error:
        raise ConfigError(
            f"--service {service}: this is no pod of a cluster; run it in one: kubectl exec "
            "deploy/NAME-router -- kvasir record - --service NAME-router"
        ) from error
    return asyncio.run(router_addresses(access, service))
