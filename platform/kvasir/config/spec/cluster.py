"""The part of the deployment spec for the cluster: discovery of workers, and the state of Ray.

The chart and the router share the labels.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvasir.config.spec.base import Spec
from kvasir.core.membership import is_worker_address

DEPLOYMENT_LABEL = "kvasir.dev/deployment"
"""Label of Services, and therefore of their EndpointSlices, with the name of the deployment."""
POOL_LABEL = "kvasir.dev/pool"
"""Label of the same objects with the pool whose workers they select."""
_REDIS = re.compile(
    r"(?:rediss?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[-A-Za-z0-9._]*[A-Za-z0-9])?):(\d{1,5})"
)


LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=317,
    ),
]


class NodeLabelsSpec(Spec):
    """Node labels from which the location of workers is known. The chart passes the labels of the same names
    of each pod to its worker: Kubernetes copies the zone from node to pod (from 1.35 by default), and an
    admission policy can copy the others. Zones are known without labels too, from EndpointSlices."""

    zone: LabelKey = "topology.kubernetes.io/zone"
    rack: LabelKey | None = None
    """No default, because providers use different labels. Racks need unique names only within a zone."""
    nvlink_domain: LabelKey = "nvidia.com/gpu.clique"
    """The default is set by NVIDIA's GPU operator on nodes with NVLink between nodes."""


class KubernetesDiscoverySpec(Spec):
    """Discovery through the Kubernetes API. Workers are the endpoints of Services with the labels
    `kvasir.dev/deployment: NAME` and `kvasir.dev/pool: POOL`, one Service per pool. If an engine spans
    several pods, the Service selects only the first one, which serves the sessions."""

    namespace: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    """Namespace of the Services. Default: the namespace of the router."""
    port: str = Field(default="session", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=15)
    """Name of the Service port on which workers serve sessions."""
    address_family: Literal["ipv4", "ipv6"] = "ipv4"
    """Address family to use for workers that have both."""
    credentials_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Folder with `token`, `ca.crt` and `namespace` of the service account. The files are read for every
    request, so they can be rotated."""
    request_timeout_s: float = Field(default=10.0, gt=0, le=60)
    """Timeout of requests to the API server."""
    node_labels: NodeLabelsSpec = NodeLabelsSpec()
    resync_s: float = Field(default=300.0, ge=30, le=86_400)
    """Interval between full lists, in addition to the watch."""


class DiscoverySpec(Spec):
    """How routers find workers."""

    kind: Literal["ray", "static", "kubernetes"] = "ray"
    endpoints: tuple[str, ...] = ()
    """Workers for `static`, each as `pool=host:port`."""
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
    """State of Ray. Serving does not depend on the Ray head; starting and replacing workers does."""

    head_redis_url: str | None = None
    """Redis that stores the state of the Ray head: `redis://host:port`, or `rediss://` with TLS. Unset: a
    folder on this machine, which survives a restart of the head process but not the loss of the machine."""
    head_redis_ca_file: str | None = None
    """PEM certificates of the authorities that certify that server, with `rediss://` only. Unset: those of
    the system. Ray checks that the certificate is theirs, and not that it names the host."""

    @field_validator("head_redis_url")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = _REDIS.fullmatch(value)
        if address is None or not 0 < int(address[1]) <= 65535:
            raise ValueError(
                "redis://host:port or rediss://host:port, without credentials (they would be visible in the "
                "arguments of Ray's processes), as in redis://127.0.0.1:6379"
            )
        return value

    @model_validator(mode="after")
    def _certified_by_someone(self) -> Self:
        if self.head_redis_ca_file is not None and not (self.head_redis_url or "").startswith("rediss://"):
            raise ValueError(
                "head_redis_ca_file: head_redis_url does not use TLS; use rediss://, or leave it unset"
            )
        return self
