"""The members of an InferencePool: its pods that are ready, one endpoint for each of its ports.

Both objects are listed every few seconds. While the API server does not answer, the members stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from kvasir.core.errors import ConfigError
from kvasir.core.membership import host_port
from kvasir_platform.cluster.kubernetes.api import ApiError, Listing

log = logging.getLogger(__name__)

_MAX_PORTS = 8


class Lists(Protocol):
    """What is needed of the API server (kvasir_platform.cluster.kubernetes.api.ApiServer)."""

    async def list(self, collection: str, params: Mapping[str, str]) -> Listing: ...


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] = {}


class _Port(msgspec.Struct):
    number: int


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: list[_Port]


class _Pool(msgspec.Struct):
    spec: _PoolSpec


class _Condition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct, rename="camel"):
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[_Condition] = []


class _PodMeta(msgspec.Struct, rename="camel"):
    deletion_timestamp: str | None = None


class _Pod(msgspec.Struct):
    metadata: _PodMeta
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def ready(self) -> bool:
        """Whether it may get requests."""
        conditions = self.status.conditions
        serves = any(each.type == "Ready" and each.status == "True" for each in conditions)
        return serves and bool(self.status.pod_ip) and self.metadata.deletion_timestamp is None


class PoolMembers:
    """The endpoints of one pool, read from `api`."""

    def __init__(self, api: Lists, namespace: str, pool: str) -> None:
        self._api = api
        self._namespace = namespace
        self._pool = pool
        self._warned = False

    async def read(self) -> frozenset[str] | None:
        """Return the endpoints, each `ip:port`; None if the API server does not tell. Raise ConfigError for a
        pool that selects all pods or has no port."""
        try:
            pools = await self._api.list(
                f"/apis/inference.networking.k8s.io/v1/namespaces/{self._namespace}/inferencepools",
                {"fieldSelector": f"metadata.name={self._pool}"},
            )
            raw = pools.items.get(self._pool)
            if raw is None:
                self._warn(f"there is no InferencePool {self._pool} in namespace {self._namespace}")
                return None
            spec = msgspec.json.decode(raw, type=_Pool).spec
            labels = spec.selector.match_labels
            if not labels or not spec.target_ports:
                raise ConfigError(f"InferencePool {self._pool} needs selector.matchLabels and targetPorts")
            chosen = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            pods = await self._api.list(
                f"/api/v1/namespaces/{self._namespace}/pods", {"labelSelector": chosen}
            )
            found = [msgspec.json.decode(each, type=_Pod) for each in pods.items.values()]
        except (ApiError, msgspec.DecodeError) as error:
            self._warn(f"the members of InferencePool {self._pool} cannot be read: {error}")
            return None
        self._warned = False
        ports = [port.number for port in spec.target_ports[:_MAX_PORTS]]
        return frozenset(host_port(pod.status.pod_ip, port) for pod in found if pod.ready for port in ports)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s; the known endpoints stay", text)
