"""Ray's process in a pod is monitored, and ends with all its descendants."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil
import pytest

from kvasir_platform.cluster.ray.node import RayNode, ask_to_end, more_open_files

# Stands for `ray start --block`, with a replica below it that is named as Ray names them and ignores SIGTERM.
PARENT = """
import subprocess, sys, time
child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
below = subprocess.Popen([sys.argv[1], "-c", child], executable=sys.executable, stdout=subprocess.PIPE)
below.stdout.readline()
open(sys.argv[2], "w").close()
time.sleep(600)
"""


@pytest.fixture(params=["ray::ServeReplica:kvasir-decode:decode", "ray::EngineFollower.run"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> RayNode:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    command = [sys.executable, "-c", PARENT, request.param, str(ready)]
    made = RayNode.start(command, os.environ)
    ready.read_bytes()
    return made


def test_a_replica_is_known_by_its_name_and_nothing_outlives_the_stop(node: RayNode) -> None:
    try:
        (replica,) = node.replicas()
        assert node.status is None
    finally:
        node.stop()
    assert node.status is not None
    psutil.wait_procs([replica], timeout=10)
    assert not replica.is_running()
    assert node.replicas() == []
    node.stop()


def test_an_end_that_nobody_asked_for_is_seen_with_its_status() -> None:
    node = RayNode.start([sys.executable, "-c", "raise SystemExit(7)"], os.environ)
    node.process.wait(10)
    assert node.status == 7
    node.stop()


# Stands for `ray start --block`, which goes on without the process that makes it a node of the cluster.
WITHOUT_NODE = """
import subprocess, sys, time
below = subprocess.Popen([sys.argv[1], "600"])
open(sys.argv[2], "w").close()
time.sleep(600)
"""


@pytest.mark.slow
def test_a_node_that_ray_has_taken_out_of_the_cluster_has_ended_well(tmp_path: Path) -> None:
    ready, raylet = tmp_path / "ready", tmp_path / "raylet"
    os.mkfifo(ready)
    raylet.symlink_to("/bin/sleep")
    node = RayNode.start([sys.executable, "-c", WITHOUT_NODE, str(raylet), str(ready)], os.environ)
    try:
        ready.read_bytes()
        assert node.status is None
        (below,) = node.process.children()
        assert below.name() == "raylet"
        below.kill()
        psutil.wait_procs([below], timeout=0.1)
        assert node.status == 0
    finally:
        node.stop()


def test_one_that_is_gone_already_can_be_asked_to_end(node: RayNode) -> None:
    replicas = node.replicas()
    node.stop()
    psutil.wait_procs(replicas, timeout=10)
    ask_to_end(replicas)


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [((1024, 4096), (4096, 4096)), ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY))],
)
def test_it_may_open_as_many_files_as_ray_needs_or_as_are_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: tuple[int, int]
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: told.append(pair))
    more_open_files()
    assert told == [wanted]
