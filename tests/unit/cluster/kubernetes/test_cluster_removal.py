"""What is done before a release is uninstalled: the RayCluster goes, with its pods and its state, in an order
in which nothing is left that needs what Helm deletes next. Time is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.kit.cluster.api_server import api_server
from tests.kit.gateway.api_requests import FOREGROUND, Rule

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.cluster_removal import (
    ClusterView,
    KubernetesRayCluster,
    remove_cluster,
)

PATIENCE_S = 20.0
THERE = ClusterView(uid="uid-7", storage="uid-7", deleting=False, heads=True, pods=True)
CLUSTERS, PODS = "/apis/ray.io/v1/namespaces/default/rayclusters", "/api/v1/namespaces/default/pods"
HEAD_LABELS = {"ray.io/cluster": "llm", "ray.io/node-type": "head"}
WORKER_LABELS = {"ray.io/cluster": "llm", "ray.io/node-type": "worker"}


@dataclass
class Played:
    """A cluster whose pods end at given times after its deletion; None for never. `held`: a finalizer keeps
    it."""

    there: ClusterView | None = THERE
    heads_end_s: float | None = 3.0
    pods_end_s: float | None = 8.0
    held: bool = True
    stuck: bool = False
    time_s: float = 0.0
    deleted_s: float | None = None
    done: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def view(self) -> ClusterView | None:
        if self.there is None or self.deleted_s is None:
            return self.there
        since = self.time_s - self.deleted_s
        heads = self.heads_end_s is None or since < self.heads_end_s
        pods = heads or self.pods_end_s is None or since < self.pods_end_s
        if not pods and not self.held:
            self.there = None
            return None
        return replace(self.there, deleting=True, heads=heads, pods=pods)

    def delete(self, uid: str) -> None:
        self.deleted_s = self.time_s
        self.note(f"deleted {uid}")

    def release(self, uid: str) -> None:
        self.note(f"released {uid}")
        if not self.stuck:
            self.there = None

    def note(self, what: str) -> None:
        self.done.append(f"{self.time_s:g} s: {what}")

    def clean(self, storage: str) -> int:
        self.note(f"cleaned {storage}")
        return 5

    def pause(self, seconds: float) -> None:
        self.time_s += seconds

    def remove(self, clean: Callable[[str], int] | None) -> None:
        remove_cluster(
            self,
            clean,
            patience_s=PATIENCE_S,
            now=lambda: self.time_s,
            pause=self.pause,
            say=self.said.append,
        )


def test_state_is_deleted_when_the_head_has_ended_and_the_cluster_when_its_pods_have() -> None:
    played = Played()
    played.remove(played.clean)
    assert played.done == ["0 s: deleted uid-7", "3 s: cleaned uid-7", "8 s: released uid-7"]
    assert played.said[-1] == "the RayCluster is gone"


def test_nothing_is_done_where_there_is_no_cluster() -> None:
    played = Played(there=None)
    played.remove(played.clean)
    assert (played.done, played.time_s) == ([], 0.0)


def test_pods_that_do_not_end_hold_up_nothing_for_longer_than_their_time() -> None:
    """Of a node that is lost, say."""
    played = Played(heads_end_s=None, pods_end_s=None)
    played.remove(played.clean)
    assert played.done == ["0 s: deleted uid-7", "20 s: cleaned uid-7", "20.25 s: released uid-7"]
    assert "pods have not ended within 20 s; they end by their own grace" in played.said


def test_state_is_deleted_also_of_a_cluster_that_no_finalizer_held() -> None:
    played = Played(held=False, heads_end_s=1.0, pods_end_s=1.0)
    played.remove(played.clean)
    assert played.done == ["0 s: deleted uid-7", "1 s: cleaned uid-7"]


def test_a_cluster_that_stores_no_state_is_released_when_its_pods_have_ended() -> None:
    played = Played()
    played.remove(None)
    assert played.done == ["0 s: deleted uid-7", "8 s: released uid-7"]


def test_a_redis_that_cannot_be_used_holds_up_nothing_and_what_is_left_is_told() -> None:
    def refused(storage: str) -> int:
        raise ConfigError("Redis at r:6379: cannot be reached")

    played = Played()
    played.remove(refused)
    assert played.there is None
    assert any("stays in Redis, under RAYuid-7@*: Redis at r:6379" in each for each in played.said)


def test_a_cluster_that_is_being_deleted_already_is_not_deleted_again() -> None:
    played = Played(there=replace(THERE, deleting=True), deleted_s=0.0)
    played.remove(played.clean)
    assert played.done == ["3 s: cleaned uid-7", "8 s: released uid-7"]


def test_a_cluster_that_something_else_holds_is_an_error() -> None:
    played = Played(stuck=True)
    with pytest.raises(ConfigError, match="the RayCluster remains 30 s after its deletion"):
        played.remove(played.clean)


async def test_a_cluster_is_deleted_in_the_foreground_and_only_the_one_that_was_seen(tmp_path: Path) -> None:
    async with api_server(tmp_path) as server:
        access = Access(server.host, server.port, server.write_credentials(tmp_path / "account"))
        cluster = KubernetesRayCluster(access, "llm")
        assert await asyncio.to_thread(cluster.view) is None
        held = ["ray.io/gcs-ft-redis-cleanup-finalizer"]
        made = server.put(CLUSTERS, {"metadata": {"name": "llm", "finalizers": held}})
        server.put(PODS, {"metadata": {"name": "w", "labels": WORKER_LABELS}})
        server.put(PODS, {"metadata": {"name": "h", "labels": HEAD_LABELS}})
        uid = made["metadata"]["uid"]
        assert await asyncio.to_thread(cluster.view) == ClusterView(uid, uid, False, heads=True, pods=True)
        with pytest.raises(ConfigError, match=r"refused to delete the RayCluster llm \(409\)"):
            await asyncio.to_thread(cluster.delete, "another")
        await asyncio.to_thread(cluster.delete, uid)
        assert server._objects[CLUSTERS, "llm"]["metadata"]["finalizers"] == [*held, FOREGROUND]
        server.delete(PODS, "h")
        assert await asyncio.to_thread(cluster.view) == ClusterView(uid, uid, True, heads=False, pods=True)
        await asyncio.to_thread(cluster.release, uid)
        assert await asyncio.to_thread(cluster.view) is None


async def test_the_storage_namespace_is_kuberays(tmp_path: Path) -> None:
    async with api_server(tmp_path) as server:
        access = Access(server.host, server.port, server.write_credentials(tmp_path / "account"))
        cluster = KubernetesRayCluster(access, "llm")
        meta = {"name": "llm", "annotations": {"ray.io/external-storage-namespace": "named"}}
        server.put(CLUSTERS, {"metadata": meta})
        view = await asyncio.to_thread(cluster.view)
        assert view is not None
        assert view.storage == "named"
        options = {"gcsFaultToleranceOptions": {"externalStorageNamespace": "set"}}
        server.put(CLUSTERS, {"metadata": meta, "spec": options})
        view = await asyncio.to_thread(cluster.view)
        assert view is not None
        assert view.storage == "set"


async def test_a_missing_right_is_named(tmp_path: Path) -> None:
    only = (Rule(verbs=("get",), resources=("rayclusters",), groups=("ray.io",), names=("llm",)),)
    async with api_server(tmp_path) as server:
        server.rules["system:serviceaccount:default:router"] = only
        server.put(CLUSTERS, {"metadata": {"name": "llm"}})
        access = Access(server.host, server.port, server.write_credentials(tmp_path / "account"))
        with pytest.raises(ConfigError, match=r"refused to list pods of the RayCluster llm \(403\)"):
            await asyncio.to_thread(KubernetesRayCluster(access, "llm").view)
        with pytest.raises(ConfigError, match=r"refused to get the RayCluster other \(403\)"):
            await asyncio.to_thread(KubernetesRayCluster(access, "other").view)
