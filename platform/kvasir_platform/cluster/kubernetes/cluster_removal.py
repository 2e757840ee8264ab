"""Removes a release's RayCluster, its pods, and what its head stored in Redis, before Helm deletes what they
need.

KubeRay's finalizer keeps a RayCluster until a Job of its own has emptied Redis. That Job runs with the head's
service account and knows no password file, so it cannot finish in a release that is being uninstalled. Here
the RayCluster is deleted in the foreground: Kubernetes' garbage collector ends the pods even where no
operator runs, and the object stays until its state is gone. What the finalizer stands for is then done, and
it is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, Protocol

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.objects import KubernetesObjects

POLL_S = 0.25
LEAVING_S = 10.0
"""How long the object may remain after its finalizers have been removed."""
_NAMESPACE = "ray.io/external-storage-namespace"


class Step(Enum):
    """What to do next."""

    DELETE = "delete the RayCluster"
    WAIT = "wait for its pods to end"
    CLEAN = "delete the head's state"
    RELEASE = "remove its finalizers"
    DONE = "nothing"


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A RayCluster that exists. `storage` is the head's namespace in Redis; `heads` and `pods` whether pods
    of the head, and any, have not ended."""

    uid: str
    storage: str
    deleting: bool
    heads: bool = False
    pods: bool = False


def next_step(view: ClusterView | None, *, cleaned: bool, in_time: bool) -> Step:
    """Decide by what there is. `cleaned`: the head's state has been deleted, or there was none; `in_time`:
    pods may still be waited for. The head writes its state until it ends, so that it is waited for first."""
    if view is None:
        return Step.DONE if cleaned else Step.CLEAN
    if not view.deleting:
        return Step.DELETE
    if not cleaned and not (view.heads and in_time):
        return Step.CLEAN
    if cleaned and not (view.pods and in_time):
        return Step.RELEASE
    return Step.WAIT


class RemovableCluster(Protocol):
    """One RayCluster. Every method raises ConfigError."""

    def view(self) -> ClusterView | None:
        """Look at it and its pods; None if there is none."""
        ...

    def delete(self, uid: str) -> None:
        """Begin to delete that object."""
        ...

    def release(self, uid: str) -> None:
        """Remove the finalizers of that object."""
        ...


def remove_cluster(
    cluster: RemovableCluster,
    clean: Callable[[str], int] | None,
    *,
    patience_s: float,
    now: Callable[[], float],
    pause: Callable[[float], None],
    say: Callable[[str], None],
) -> None:
    """Remove it, and wait at most `patience_s` seconds for its pods; Kubernetes ends the others. `clean`
    deletes the head's state of a storage namespace, and returns how many keys there were; None if it stores
    none. Raises ConfigError if the RayCluster remains."""
    began, storage = now(), ""
    cleaned = clean is None
    while True:
        view = cluster.view()
        storage = storage if view is None else view.storage
        left_s = began + patience_s - now()
        match next_step(view, cleaned=cleaned or not storage, in_time=left_s > 0):
            case Step.DONE:
                say("the RayCluster is gone")
                return
            case Step.DELETE if view is not None:
                say("deleting the RayCluster and its pods")
                cluster.delete(view.uid)
            case Step.CLEAN if clean is not None:
                _clean(clean, storage, say)
                cleaned = True
            case Step.RELEASE if view is not None:
                if left_s < -LEAVING_S:
                    raise ConfigError(
                        f"the RayCluster remains {patience_s + LEAVING_S:.0f} s after its deletion; see "
                        "`kubectl describe raycluster`, and what adds finalizers to it"
                    )
                if view.pods:
                    say(f"pods have not ended within {patience_s:g} s; they end by their own grace")
                cluster.release(view.uid)
            case _:
                pass
        pause(POLL_S)


def _clean(clean: Callable[[str], int], storage: str, say: Callable[[str], None]) -> None:
    try:
        say(f"deleted {clean(storage)} keys of Ray's head from Redis")
    except ConfigError as error:
        # What is left is under the UID of this RayCluster, which no other head reads.
        say(f"the state of Ray's head stays in Redis, under RAY{storage}@*: {error.message}")


class KubernetesRayCluster:
    """The RayCluster of that name in the pod's own namespace."""

    def __init__(self, access: Access, name: str) -> None:
        self._name = name
        self._clusters = KubernetesObjects(access, "/apis/ray.io/v1", "rayclusters")
        self._pods = KubernetesObjects(access, "/api/v1", "pods")

    def view(self) -> ClusterView | None:
        """See the port."""
        found = self._allowed("get", *self._clusters.get(self._name))
        if found is None:
            return None
        meta = found["metadata"]
        options = (found.get("spec") or {}).get("gcsFaultToleranceOptions") or {}
        named = (meta.get("annotations") or {}).get(_NAMESPACE, "")
        heads = self._there("head")
        return ClusterView(
            uid=meta["uid"],
            storage=options.get("externalStorageNamespace") or named or meta["uid"],
            deleting=bool(meta.get("deletionTimestamp")),
            heads=heads,
            pods=heads or self._there("worker"),
        )

    def delete(self, uid: str) -> None:
        """See the port."""
        options = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid},
        }
        self._allowed("delete", *self._clusters.delete(self._name, options))

    def release(self, uid: str) -> None:
        """See the port."""
        change = {"metadata": {"uid": uid, "finalizers": None}}
        self._allowed("patch", *self._clusters.patch(self._name, change))

    def _there(self, kind: str) -> bool:
        selector = f"ray.io/cluster={self._name},ray.io/node-type={kind}"
        running = "status.phase!=Succeeded,status.phase!=Failed"
        params = {"labelSelector": selector, "fieldSelector": running, "limit": "1"}
        found = self._allowed("list pods of", *self._pods.list(params))
        return bool(found and found.get("items"))

    def _allowed(self, what: str, status: int, answer: dict[str, Any]) -> dict[str, Any] | None:
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status not in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            raise ConfigError(
                f"the API server refused to {what} the RayCluster {self._name} ({status}): "
                f"{answer.get('message', '')}; the chart gives this pod the right to get, delete and patch "
                "it, and to list pods"
            )
        return answer
