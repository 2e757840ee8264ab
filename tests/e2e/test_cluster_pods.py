"""A release in a cluster, with this test in place of KubeRay (tests/kit/cluster/pods.py).

The engines are simulated and deterministic: every stream of one prompt must have the same text.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kit.cluster.pods import (
    DECODE,
    HEALTH,
    NEW,
    OLD,
    PATIENCE_S,
    PREFILL,
    SESSION,
    PodCluster,
    health,
    pod_cluster,
    ready_workers,
    serves,
    steady_load,
    stream_text,
)

from kvasir.config.load.model_files import resolve_model
from kvasir_platform.cluster.local.commands import ControlCommand, ask, socket_path

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
]

SPARE = "127.0.0.44"
HEAD_END_S = 10.0
"""Within which the head's pod ends, of a longer grace."""


def _spec() -> dict[str, Any]:
    # One dict per pool: YAML would turn a shared one into an alias, and both would change.
    prefill, decode = ({"kind": "sim", "sim": {"decode_step_s": 0.02}} for _ in range(2))
    return {
        "version": "kvasir/v1",
        "name": "kvasir",
        "pools": [
            {"name": "prefill", "role": "prefill", "engine": prefill},
            {"name": "decode", "role": "decode", "engine": decode},
        ],
        "worker": {"host": "pod", "port": SESSION, "health_port": HEALTH, "drain_s": 5},
        "gateway": {"host": "127.0.0.1", "port": 0},
        "discovery": {
            "kind": "static",
            "endpoints": [
                f"{pool}={ip}:{SESSION}"
                for pool, ip in (("prefill", PREFILL), ("decode", DECODE), ("decode", SPARE))
            ],
        },
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PodCluster]:
    """A release of two pools, without pods."""
    with pod_cluster(tmp_path, _spec()) as made:
        yield made


def test_a_release_serves_outlives_its_head_and_loses_pods_without_a_stream(cluster: PodCluster) -> None:
    cluster.first_head()
    assert health(DECODE) is None, "a pod without its replica must not be ready"
    cluster.first_workers({"prefill": PREFILL, "decode": DECODE})
    url = cluster.router()
    expected = stream_text(url)
    serving = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)}
    assert None not in serving.values()

    # The head's node loses power, and its pod restarts with an empty disk.
    with steady_load(url, expected):
        cluster.kill("head")
        cluster.head()
        cluster.until(lambda: cluster.running() == {"prefill": 1, "decode": 1}, "the pools are taken over")
    assert {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)} == serving

    # It accepts commands again, as `kubectl exec` sends them: a second decode worker gets the second pod.
    cluster.worker("decode", SPARE)
    told = list(ask(socket_path(cluster.head_dir), ControlCommand("scale", "decode", 2), PATIENCE_S))
    assert told[-1]["event"] == "done", told
    cluster.until(lambda: serves(SPARE), "the second decode pod is ready")
    cluster.until(lambda: ready_workers(url) == 3, "the router has three workers")

    # A graceful end of the head's pod does not affect the workers, and requested sizes are kept.
    with steady_load(url, expected):
        assert cluster.end("head", HEAD_END_S) == 0
        cluster.head()
        cluster.until(lambda: cluster.running() == {"prefill": 1, "decode": 2}, "the pools are taken over")
    assert {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)} == serving

    # Kubernetes stops a worker's pod while streams run.
    with steady_load(url, expected):
        assert cluster.end(DECODE) == 0
        assert cluster.events(DECODE, "draining")
    assert health(DECODE) is None

    # KubeRay creates another pod, and the missing worker starts in it.
    cluster.worker("decode", DECODE)
    cluster.until(lambda: ready_workers(url) == 3, "the router has three workers again")

    # A change of the spec replaces the affected workers one by one, and no others.
    spec = yaml.safe_load(cluster.spec_file.read_text())
    spec["pools"][1]["engine"] |= {"max_num_seqs": 32}
    before = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE, SPARE)}
    with steady_load(url, expected):
        cluster.replace_spec(spec)
        cluster.until(
            lambda: all(cluster.replica(ip) not in (None, before[ip]) for ip in (DECODE, SPARE)),
            "both decode workers are replaced",
        )
        cluster.until(lambda: ready_workers(url) == 3, "the router has the changed ones")
    assert cluster.replica(PREFILL) == before[PREFILL]

    # Another template of decode's pods, with another spec: both are applied at once, pod by pod.
    spec["pools"][1]["engine"] |= {"max_num_seqs": 16}
    before = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE, SPARE)}
    seen: dict[str, set[int]] = {DECODE: set(), SPARE: set()}

    def moved() -> bool:
        cluster.make_anew("decode", NEW, DECODE, SPARE)
        for ip, pids in seen.items():
            if pid := cluster.replica(ip):
                pids.add(pid)
        assert any(cluster.replica(ip) for ip in seen), "a pool of two is never without one"
        return len(cluster.events("head", "let_go")) == 2 and cluster.running() == {"prefill": 1, "decode": 2}

    with steady_load(url, expected):
        cluster.set_desired_pods(prefill=OLD, decode=NEW)
        cluster.replace_spec(spec)
        cluster.until(moved, "decode's workers are in pods of the changed template")
        cluster.until(lambda: ready_workers(url) == 3, "the router has those in the pods made anew")
    assert [told["template"] for told in cluster.events("head", "let_go")] == [OLD, OLD]
    assert all(len(pids - {before[ip]}) == 1 for ip, pids in seen.items()), "replaced once each"
    assert all(cluster.events(ip, "left") for ip in seen)
    assert cluster.replica(PREFILL) == before[PREFILL]
    assert not cluster.events("head", "settled")

    # Ray's head loses its GCS: the process exits, so that KubeRay restarts the pod.
    assert cluster.lose_gcs() == 1
    assert cluster.events("head", "failed")[-1]["code"] == "ray_head_lost"
    assert stream_text(url) == expected


def test_a_pool_whose_weights_come_late_says_so_and_is_started_again_until_it_serves(tmp_path: Path) -> None:
    weights = tmp_path / "kvasir-tiny"
    spec = _spec()
    spec |= {"model": {"source": str(weights)}, "disaggregation": "never", "pools": spec["pools"][1:]}
    spec["pools"][0]["role"] = "both"
    spec["discovery"]["endpoints"] = [f"decode={DECODE}:{SESSION}"]
    with pod_cluster(tmp_path, spec) as late:
        late.first_head()
        late.worker("decode", DECODE)
        late.until(lambda: bool(late.events("head", "start_failed")), "Serve gives up on the pool")
        failed = late.events("head", "start_failed")[0]
        (told,) = ask(socket_path(late.head_dir), ControlCommand("status", ""), PATIENCE_S)
        (pool,) = told["pools"]
        assert failed["attempt"] == 1
        assert pool["state"] == "DEPLOY_FAILED"
        assert pool["detail"].startswith("attempt 1 failed, the next one is at ")
        # The worker's own error is in the status, in the head's log and in that of the worker's pod.
        assert str(weights) in failed["message"]
        assert str(weights) in pool["detail"]
        assert str(weights) in (late.folder / f"{DECODE}.log").read_text(errors="replace")
        assert not serves(DECODE)

        shutil.copytree(resolve_model("kvasir-tiny"), weights)
        late.until(lambda: serves(DECODE), "the pool serves, with the same spec and in the same pod")
        assert late.events("head", "starting_again")
        assert late.processes[DECODE].poll() is None
        assert stream_text(late.router())
