"""Real engines outlive Ray's head and the Redis that has its state, with this test in place of KubeRay as in
test_cluster_pods: a restarted control process takes over the same processes, and no stream fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.cluster.pods import (
    DECODE,
    PREFILL,
    PodCluster,
    pod_cluster,
    steady_load,
    stream_text,
    vllm_release,
)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

BOTH = {"prefill": 1, "decode": 1}
KILLS = 10


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PodCluster]:
    """A release of two pools, without pods. Its Redis has a volume."""
    with pod_cluster(tmp_path, vllm_release(DECODE), "--appendonly", "yes", "--dir", str(tmp_path)) as made:
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
        cluster.restart_redis(BOTH)
    assert {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)} == engines
