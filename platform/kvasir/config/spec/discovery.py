"""The deployment spec's part about finding workers through Kubernetes, and the labels that say which.

The chart and the router have to mean the same by them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvasir.config.spec.base import Spec

DEPLOYMENT_LABEL = "kvasir.dev/deployment"
"""Label of Services, and so of their EndpointSlices: the deployment's name."""
POOL_LABEL = "kvasir.dev/pool"
"""Label of the same: the pool whose workers they select."""


class KubernetesDiscoverySpec(Spec):
    """How the router asks the API server of its cluster. Workers are the endpoints of the Services that are
    labelled `kvasir.dev/deployment: NAME` and `kvasir.dev/pool: POOL`, one Service for each pool. Where an
    engine has several pods, it selects the first one only, which serves the sessions."""

    namespace: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    """Where those Services are; by default the router's own namespace."""
    port: str = Field(default="session", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=15)
    """Name of the Services' port at which workers serve sessions."""
    address_family: Literal["ipv4", "ipv6"] = "ipv4"
    """Which address of a worker is taken where it has both."""
    credentials_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Folder with the service account's `token`, `ca.crt` and `namespace`. They are read again for every
    request, so that they can be rotated."""
    request_timeout_s: float = Field(default=10.0, gt=0, le=60)
    """The API server must answer within this time."""
    resync_s: float = Field(default=300.0, ge=30, le=86_400)
    """How often everything is asked for anew, beside the changes that are told at once."""
