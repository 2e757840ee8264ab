"""The container of Ray's autoscaler, which KubeRay puts into the head's pod: it ends with the pod, and makes
events of the RayCluster of what the control process could not start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.helm.kubelet import Kubelet
from tests.helm.rendering import NAMESPACE, Pod, render
from tests.helm.test_processes import give_rights
from tests.kit.cluster.api_server import api_server

from kvasir_platform.apps.common.failed_starts import FailedStartsFile

CLUSTERS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
NAME = "llm-kvasir"
RAY = """#!/bin/sh
echo "$@" >{told}
exec sleep 600
"""
END_S = 10.0
IS_ROOT = os.geteuid() == 0


def head() -> Pod:
    (found,) = (pod for pod in render().pods() if pod.component == "head")
    return found


@pytest.mark.skipif(not IS_ROOT, reason="a process namespace needs root")
def test_the_autoscaler_ends_when_its_pod_is_asked_to(tmp_path: Path) -> None:
    """The container's command as the first process of a process namespace, as in a container."""
    (container,) = (each for each in head().containers if each["name"] == "autoscaler")
    told = tmp_path / "told"
    os.mkfifo(told)
    (tmp_path / "ray").write_text(RAY.format(told=told))
    (tmp_path / "ray").chmod(0o755)
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *container["command"], *container["args"]],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RAY_CLUSTER_NAME": "llm-kvasir",
            "RAY_CLUSTER_NAMESPACE": "serving",
        },
    )
    try:
        assert told.read_text().split() == [
            "kuberay-autoscaler",
            *("--cluster-name", "llm-kvasir", "--cluster-namespace", "serving"),
        ]
        (first,) = psutil.Process(outer.pid).children()
        first.send_signal(signal.SIGTERM)
        assert outer.wait(END_S) == 0
    finally:
        outer.kill()
        outer.wait()


async def test_a_pool_that_does_not_start_is_an_event_of_the_raycluster(tmp_path: Path) -> None:
    """Written with the chart's rights, while the control process has none."""
    told, pods = tmp_path / "told", tmp_path / "pods"
    (tmp_path / "ray").write_text(RAY.format(told=told))
    (tmp_path / "ray").chmod(0o755)
    pods.mkdir()
    pod = head()
    number = [each["name"] for each in pod.spec["volumes"]].index("failed-starts")
    shared = pods / "head" / str(number)
    shared.mkdir(parents=True)
    async with api_server(tmp_path) as server:
        fill = give_rights(server, render())
        server.put(CLUSTERS, {"metadata": {"name": NAME}})
        path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = {**server.environment(), "PATH": path}
        kubelet = Kubelet(pods, render(), {}, lambda _name: {"auth_token": b"t"}, fill, environment)
        cluster = {"RAY_CLUSTER_NAME": NAME, "RAY_CLUSTER_NAMESPACE": NAMESPACE}
        try:
            await kubelet.start(pod, "head", "127.0.0.1", container_name="autoscaler", **cluster)
            tell = FailedStartsFile(shared / "failed-starts.json").noting(lambda *_, **__: None)
            why = "the engine has no room for KV; set engine.gpu_memory_utilization"
            tell("start_failed", pool="decode", attempt=2, next_at="2026-11-26T08:00:05+00:00", message=why)
            await asyncio.wait_for(server.until(lambda: EVENTS in {at for at, _ in server._objects}), 60)
            assert await kubelet.end("head") == 0
        finally:
            await kubelet.close()
        (event,) = (each for (at, _), each in server._objects.items() if at == EVENTS)
        about = event["involvedObject"]
        assert (about["kind"], about["name"]) == ("RayCluster", NAME)
        assert about["uid"] == server._objects[CLUSTERS, NAME]["metadata"]["uid"]
        assert event["reason"] == "PoolStartFailed"
        assert event["message"].startswith(
            "pool decode does not start (attempt 2, the next one at 2026-11-26T"
        )
        assert event["message"].endswith(why)
        assert {(each.verb, each.resource) for each in server.asked} == {
            ("get", "rayclusters"),
            ("create", "events"),
        }


def test_the_control_process_leaves_the_reason_where_no_token_of_its_own_is() -> None:
    control, autoscaler = head().containers
    mounts = {each["name"]: each for each in control["volumeMounts"]}
    assert "--failed-starts=/run/kvasir/failed-starts.json" in control["args"]
    assert mounts["failed-starts"]["mountPath"] == "/run/kvasir"
    assert "autoscaler-token" not in mounts
    (read,) = (each for each in autoscaler["volumeMounts"] if each["name"] == "failed-starts")
    assert read == {"name": "failed-starts", "mountPath": "/run/kvasir", "readOnly": True}


def test_without_an_autoscaler_there_are_no_further_rights() -> None:
    release = render({"ray": {"autoscaler": {"enabled": False}}})
    assert [each for each in release.of_kind("Role") if each["metadata"]["name"].endswith("-head")] == []
    assert "failed-starts" not in str(release.of_kind("RayCluster"))
