"""One engine over two pods of a release, with this test in place of KubeRay as in test_cluster_pods, and real
vLLM: if one pod ends or is replaced, the whole engine stops gracefully."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.kit.cluster.pods import (
    HEAD,
    HEALTH,
    NEW,
    OLD,
    PATIENCE_S,
    SESSION,
    PodCluster,
    health,
    pod_cluster,
    serves,
    stream_text,
)
from tests.kit.processes import command_line

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
]

FIRST, SECOND = "127.0.0.45", "127.0.0.46"
FIRST_ANEW, SECOND_ANEW = "127.0.0.47", "127.0.0.48"
LONG = 400
ENGINE = {"threads": 1, "kv_cache_bytes": 1 << 24, "tensor_parallel_size": 2, "nodes": 2}
SPEC = {
    "version": "kvasir/v1",
    "name": "kvasir",
    "disaggregation": "never",
    "model": {"dtype": "float32", "max_model_len": 1024},
    "pools": [{"name": "wide", "role": "both", "engine": ENGINE}],
    "worker": {"host": "pod", "port": SESSION, "health_port": HEALTH, "drain_s": 60},
    "gateway": {"host": "127.0.0.1", "port": 0},
    "discovery": {"kind": "static", "endpoints": [f"wide={ip}:{SESSION}" for ip in (FIRST, FIRST_ANEW)]},
}


THIRD = "127.0.0.49"
ALONE = {"threads": 1, "kv_cache_bytes": 1 << 24}
APART = SPEC | {
    "disaggregation": "always",
    # It listens at its host, where NIXL lets UCX choose.
    "transfer": {"kind": "nccl", "host": "pod"},
    "pools": [
        {"name": "prefill", "role": "prefill", "engine": ENGINE},
        {"name": "decode", "role": "decode", "engine": ALONE},
    ],
    "discovery": {
        "kind": "static",
        "endpoints": [f"prefill={FIRST}:{SESSION}", f"decode={THIRD}:{SESSION}"],
    },
}


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PodCluster]:
    """The head of a release with pools whose engines are over two pods each, without pods."""
    spec: dict[str, Any] = getattr(request, "param", SPEC)
    with pod_cluster(tmp_path, spec) as made:
        made.first_head()
        yield made


def _follower(cluster: PodCluster, ip: str, template: str, pool: str = "wide") -> None:
    command = (
        f"ray start  --address={HEAD}:{cluster.port}  --block  --node-ip-address={ip}  --num-cpus=1 "
        "--object-store-memory=83886080  --min-worker-port=0  --max-worker-port=0 "
        f'--resources="{{\\"kvasir-follower-{pool}\\": 1, \\"kvasir-template-{template}\\": 1}}"'
    )
    cluster.pod(ip, ip, command, "kvasir_platform.apps.worker_pod", "--grace-s=80")


def _started(cluster: PodCluster, ip: str) -> None:
    """One after another: nodes on one machine compete for its files while they start."""
    log = cluster.folder / f"{ip}.log"
    cluster.until(lambda: "Ray runtime started" in log.read_text(errors="replace"), f"Ray runs in {ip}")


def _in_flight(url: str) -> int:
    workers = httpx.get(f"{url}/status", timeout=10).json()["workers"]
    return sum(worker["in_flight"] for worker in workers)


def test_both_pods_of_an_engine_come_and_go_together_and_in_good_order(cluster: PodCluster) -> None:
    cluster.worker("wide", FIRST)
    _started(cluster, FIRST)
    _follower(cluster, SECOND, OLD)
    cluster.until(partial(serves, FIRST), "the engine serves at its first pod")
    assert health(SECOND) is None
    url = cluster.router()
    expected, long = stream_text(url), stream_text(url, LONG)

    # Kubernetes stops the second pod during a stream, which no other engine could continue.
    with ThreadPoolExecutor(1) as beside:
        streamed = beside.submit(stream_text, url, LONG)
        cluster.until(lambda: _in_flight(url) == 1, "a stream is there")
        assert cluster.end(SECOND) == 0
        assert streamed.result() == long
    # KubeRay creates another pod.
    _follower(cluster, SECOND, OLD)
    cluster.until(partial(serves, FIRST), "the engine serves again")

    # Pods of another template exist beside those: the engine moves, and both old pods end.
    cluster.set_desired_pods(wide=NEW)
    cluster.worker("wide", FIRST_ANEW, NEW)
    _started(cluster, FIRST_ANEW)
    _follower(cluster, SECOND_ANEW, NEW)
    cluster.until(partial(serves, FIRST_ANEW), "the engine serves in the other pods")
    for ip in (FIRST, SECOND):
        assert cluster.processes[ip].wait(PATIENCE_S) == 0
        assert cluster.events(ip, "left")
    assert stream_text(url) == expected


@pytest.mark.parametrize("cluster", [APART], indirect=True)
def test_each_rank_hands_its_heads_over_at_the_address_of_its_own_pod(cluster: PodCluster) -> None:
    cluster.worker("prefill", FIRST)
    _started(cluster, FIRST)
    _follower(cluster, SECOND, OLD, "prefill")
    _started(cluster, SECOND)
    cluster.worker("decode", THIRD)
    for ip in (FIRST, THIRD):
        cluster.until(partial(serves, ip), f"the engine serves at {ip}")
    url = cluster.router()
    assert stream_text(url) == stream_text(url)
    series = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines())
    moved = [float(value) for name, value in series.items() if "transferred_bytes_total{" in name]
    assert sum(moved) > 0
    # The decode worker's rank connects to each rank of the other engine.
    processes = psutil.Process(cluster.processes[THIRD].pid).children(recursive=True)
    (core,) = (process for process in processes if "EngineCore" in command_line(process))
    reached = {each.raddr[0] for each in core.net_connections("tcp") if each.raddr}
    assert reached >= {FIRST, SECOND}
