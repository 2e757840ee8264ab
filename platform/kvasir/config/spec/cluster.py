"""The deployment spec's part about the cluster: how routers find workers, and where Ray keeps its state.

The labels are shared by the chart and the router.
"""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec.base import Spec
from kvasir.core.membership import is_worker_address

DEPLOYMENT_LABEL = "kvasir.dev/deployment"
"""Label of Services, and so of their EndpointSlices: the deployment's name."""
POOL_LABEL = "kvasir.dev/pool"
"""Label of the same: the pool whose workers they select."""
_REDIS = re.compile(
    r"(?:rediss?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?):(\d{1,5})"
)


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


class DiscoverySpec(Spec):
    """How the router finds workers."""

    kind: Literal["ray", "static", "kubernetes"] = "ray"
    endpoints: tuple[str, ...] = ()
    """For `static`: `pool=host:port`."""
    kubernetes: KubernetesDiscoverySpec = KubernetesDiscoverySpec()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "static" and not self.endpoints:
            raise ValueError("static discovery needs endpoints, each `pool=host:port`")
        for endpoint in self.endpoints:
            pool, eq, address = endpoint.partition("=")
            if not (pool and eq and is_worker_address(address)):
                raise ValueError(f"endpoint {endpoint!r} is not `pool=host:port`")
        return self


class RaySpec(Spec):
    """Ray's own state. Serving does not depend on Ray's head; starting and replacing workers does."""

    head_redis_url: str | None = None
    """Where Ray's head keeps its state: `redis://host:port`, or `rediss://` with TLS. Unset: in a folder of
    this machine, which outlives the head's process, but not the machine."""

    @field_validator("head_redis_url")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = _REDIS.fullmatch(value)
        if address is None or not 0 < int(address[1]) <= 65535:
            raise ValueError(
                "redis://host:port or rediss://host:port, without credentials (they would stand in the "
                "arguments of Ray's processes), as in redis://127.0.0.1:6379"
            )
        return value
