"""What `helm uninstall` does first: the hook's objects, and its Job as a process on an API server and a
Redis, with the test in place of KubeRay, of Kubernetes' garbage collector, or of a cluster in which KubeRay
is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.helm.kubelet import Kubelet
from tests.helm.rendering import NAMESPACE, Object, Release, render
from tests.helm.test_processes import give_rights, one
from tests.kit.cluster.api_server import ApiServer, api_server
from tests.kit.gateway.api_requests import FOREGROUND
from tests.kit.lab.redis_server import RedisServer
from tests.kit.programs import program

CLUSTERS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PASSWORD = "password-of-redis"
NAME = "llm-kvasir"
REDIS_KEYS = ("@KV", "@JOB", "@ACTOR")


def hooks(release: Release) -> list[Object]:
    """The objects of `helm uninstall`, in the order in which Helm makes them."""
    found = [
        each
        for each in release.objects
        if each["metadata"].get("annotations", {}).get("helm.sh/hook") == "pre-delete"
    ]
    return sorted(found, key=lambda each: int(each["metadata"]["annotations"]["helm.sh/hook-weight"]))


def test_helm_makes_what_the_job_needs_before_it_and_removes_all_after_its_success() -> None:
    made = hooks(render())
    assert [each["kind"] for each in made] == ["ServiceAccount", "Role", "RoleBinding", "Job"]
    weights = [each["metadata"]["annotations"]["helm.sh/hook-weight"] for each in made]
    assert len(set(weights)) == len(weights)
    # What failed stays, so that its log can be read, until the next attempt.
    policies = {each["metadata"]["annotations"]["helm.sh/hook-delete-policy"] for each in made}
    assert policies == {"before-hook-creation,hook-succeeded"}


def test_the_job_may_change_this_releases_cluster_and_no_other() -> None:
    (role,) = (each for each in hooks(render()) if each["kind"] == "Role")
    (cluster,) = render().of_kind("RayCluster")
    assert role["rules"][0]["resourceNames"] == [cluster["metadata"]["name"]]


def test_the_job_ends_by_itself() -> None:
    (job,) = (each for each in hooks(render({"uninstall": {"timeoutSeconds": 40}})) if each["kind"] == "Job")
    assert job["spec"]["activeDeadlineSeconds"] == 130
    assert "--timeout-s=40" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_by_default_it_takes_less_than_30_s_even_if_pods_do_not_end() -> None:
    """What is done after that wait takes a second: tests/unit/cluster/kubernetes/test_cluster_removal.py."""
    (job,) = (each for each in hooks(render()) if each["kind"] == "Job")
    assert "--timeout-s=20" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_it_can_be_switched_off() -> None:
    release = render({"uninstall": {"enabled": False}})
    assert hooks(release) == []
    assert "uninstall" not in str(release.of_kind("NetworkPolicy"))


def test_an_external_redis_is_reached_as_the_head_reaches_it() -> None:
    given = {
        "bundled": False,
        "url": "rediss://redis.example.com:6380",
        "username": "kvasir",
        "existingSecret": "redis",
        "caSecret": "redis-ca",
    }
    (job,) = (each for each in hooks(render({"redis": given})) if each["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][3:] == [
        "--redis-url=rediss://redis.example.com:6380",
        "--redis-username=kvasir",
        "--redis-password-file=/etc/kvasir/redis/password",
        "--redis-ca-file=/etc/kvasir/redis-ca/ca.crt",
    ]


def test_a_release_without_state_in_redis_asks_for_none() -> None:
    (job,) = (each for each in hooks(render({"redis": {"ray": False}})) if each["kind"] == "Job")
    assert "redis" not in str(job["spec"])


async def uninstalled(server: ApiServer, redis: RedisServer, folder: Path) -> str:
    """Run the Job as the chart renders it, with the rights that the chart gives it; give its output."""
    release = render()
    kubelet = Kubelet(
        folder,
        release,
        {f"{NAME}-redis:6379": redis.address},
        lambda _name: {"password": PASSWORD.encode()},
        give_rights(server, release),
        server.environment(),
    )
    try:
        return await kubelet.run(one(release, "uninstall"), "uninstall", "127.0.0.1")
    finally:
        await kubelet.close()


def install(server: ApiServer, redis: RedisServer) -> None:
    """What KubeRay has made of the release, and what Ray's head has stored."""
    finalizers = ["ray.io/gcs-ft-redis-cleanup-finalizer"]
    made = server.put(CLUSTERS, {"metadata": {"name": NAME, "finalizers": finalizers}})
    for kind in ("head", "worker"):
        labels = {"ray.io/cluster": NAME, "ray.io/node-type": kind}
        server.put(PODS, {"metadata": {"name": kind, "labels": labels}})
    for key in REDIS_KEYS:
        assert redis.ask("HSET", f"RAY{made['metadata']['uid']}{key}", "a", "b") == ":1"
        assert redis.ask("HSET", f"RAYof-another-release{key}", "a", "b") == ":1"


@pytest.fixture
def redis(tmp_path: Path) -> RedisServer:
    program("redis-server")
    return RedisServer(tmp_path, "--requirepass", PASSWORD, password=PASSWORD)


@pytest.mark.parametrize("kuberay", [True, False], ids=["KubeRay runs", "KubeRay is gone"])
async def test_an_uninstalled_release_leaves_no_cluster_and_no_state(
    redis: RedisServer, tmp_path: Path, kuberay: bool
) -> None:
    """The garbage collector deletes pods of a cluster that is deleted in the foreground, and so does KubeRay,
    whose own clean-up never ends for want of the password."""

    async def end_pods(server: ApiServer) -> None:
        await server.until(lambda: "delete" in server.verbs())
        keys = int(redis.ask("DBSIZE")[1:])
        # What lets the garbage collector end the pods of a cluster that still exists.
        assert FOREGROUND in server._objects[CLUSTERS, NAME]["metadata"]["finalizers"]
        if kuberay:
            labels = {"ray.io/cluster": NAME, "ray.io/node-type": "redis-cleanup"}
            server.put(PODS, {"metadata": {"name": "clean-up", "labels": labels}})
        # The head has been seen to run after the deletion, and its state is still there.
        asked = len(server.asked)
        await server.until(lambda: len(server.asked) > asked + 2)
        assert int(redis.ask("DBSIZE")[1:]) == keys
        server.delete(PODS, "head")
        server.delete(PODS, "worker")

    with redis:
        async with api_server(tmp_path) as server:
            install(server, redis)
            controllers = asyncio.ensure_future(end_pods(server))
            said = await uninstalled(server, redis, tmp_path / "pods")
            await controllers
            assert (CLUSTERS, NAME) not in server._objects
            assert {each.verb for each in server.asked} == {"get", "list", "delete", "patch"}
        assert "deleted 3 keys of Ray's head from Redis" in said
        assert "the RayCluster is gone" in said
        left = [int(redis.ask("EXISTS", f"RAYof-another-release{key}")[1:]) for key in REDIS_KEYS]
        assert left == [1, 1, 1]
        assert redis.ask("DBSIZE") == ":3"


async def test_a_release_whose_cluster_is_gone_is_uninstalled(redis: RedisServer, tmp_path: Path) -> None:
    with redis:
        async with api_server(tmp_path) as server:
            assert await uninstalled(server, redis, tmp_path / "pods") == "the RayCluster is gone\n"
