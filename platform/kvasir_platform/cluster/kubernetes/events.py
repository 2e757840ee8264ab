"""Events of the RayCluster of this release: what operators look at first, and alerts of a cluster can use."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.objects import KubernetesObjects

COMPONENT = "kvasir"
MOST_CHARACTERS = 1000
"""The API server accepts 1,024 bytes in events of its newer API, as which these are read too."""


class ClusterEvents:
    """Writes them with the rights to get the RayCluster `cluster` and to create events. `now` is the time of
    day."""

    def __init__(self, access: Access, cluster: str, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._namespace = access.namespace()
        self._clusters = KubernetesObjects(access, "/apis/ray.io/v1", "rayclusters")
        self._events = KubernetesObjects(access, "/api/v1", "events")
        self._now = now

    def warn(self, reason: str, message: str) -> None:
        """Write an event of the type Warning; the same reason and message are written once. Raises
        ConfigError if the API server does not accept it."""
        status, found = self._clusters.get(self._cluster)
        self._accepted("get the RayCluster", status, found)
        uid = str(found["metadata"]["uid"])
        status, answer = self._events.create(self._event(uid, reason, message))
        if status != HTTPStatus.CONFLICT:
            self._accepted("create an event of the RayCluster", status, answer)

    def _event(self, uid: str, reason: str, message: str) -> dict[str, Any]:
        name = sha256("\0".join((uid, reason, message)).encode()).hexdigest()[:16]
        at = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{self._cluster}.{name}", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": "ray.io/v1",
                "kind": "RayCluster",
                "name": self._cluster,
                "namespace": self._namespace,
                "uid": uid,
            },
            "type": "Warning",
            "reason": reason,
            "message": message.encode()[:MOST_CHARACTERS].decode(errors="ignore"),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }

    def _accepted(self, what: str, status: int, answer: dict[str, Any]) -> None:
        if status not in (HTTPStatus.OK, HTTPStatus.CREATED):
            raise ConfigError(
                f"the API server refused to {what} {self._cluster} ({status}): {answer.get('message', '')}; "
                "the chart gives this pod the right to get it, and to create events"
            )
