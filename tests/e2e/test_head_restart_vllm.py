"""Real engines outlive Ray's head and the Redis that has its state, with this test in place of KubeRay as in
test_cluster_pods: a restarted control process takes over the same processes, and no stream fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.cluster.pods import (
    DECODE,
    HEALTH,
    PREFILL,
    SESSION,
    PodCluster,
    pod_cluster,
    steady_load,
    stream_text,
)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

SPEC: dict[str, Any] = {
    "version": "kvasir/v1",
    "name": "kvasir",
    "disaggregation": "always",
    "model": {"dtype": "float32", "max_model_len": 1024},
    "pools": [
        {"name": role, "role": role, "engine": {"threads": 1, "kv_cache_bytes": 1 << 24}}
        for role in ("prefill", "decode")
    ],
    "transfer": {"host": "pod"},
    "worker": {"host": "pod", "port": SESSION, "health_port": HEALTH, "drain_s": 5},
    "gateway": {"host": "127.0.0.1", "port": 0},
    "discovery": {
        "kind": "static",
        "endpoints": [f"prefill={PREFILL}:{SESSION}", f"decode={DECODE}:{SESSION}"],
    },
}
BOTH = {"prefill": 1, "decode": 1}
KILLS = 10


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PodCluster]:
    """A release of two pools, without pods. Its Redis has a volume."""
    with pod_cluster(tmp_path, SPEC, "--appendonly", "yes", "--dir", str(tmp_path)) as made:
        yield made


def test_engines_outlive_the_head_and_its_redis_and_no_stream_fails(cluster: PodCluster) -> None:
    cluster.first_head()
    cluster.first_workers({"prefill": PREFILL, "decode": DECODE})
    url = cluster.router()
    expected = stream_text(url)
    engines = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)}
    assert None not in engines.values()
    with steady_load(url, expected):
        for _ in range(KILLS):
            cluster.kill("head")
            cluster.take_over(BOTH)
        # Redis restarts with its volume. Ray's head ends with its connection, and KubeRay restarts the pod.
        cluster.redis.kill()
        cluster.redis.start()
        cluster.processes["head"].wait(60)
        cluster.take_over(BOTH)
    assert {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)} == engines
