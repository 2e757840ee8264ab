"""Real engines outlive Ray's head and the Redis that has its state, with this test in place of KubeRay as in
test_cluster_pods: a restarted control process takes over the same processes, and no stream fails."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.e2e.test_cluster_pods import (
    DECODE,
    HEAD,
    HEALTH,
    OLD,
    PATIENCE_S,
    PREFILL,
    SESSION,
    Cluster,
    _free_port,
    _load,
    _serves,
    _stream,
)
from tests.kit.lab.redis_server import RedisServer

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
KILLS = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A release of two pools, without pods. Its Redis has a volume."""
    folder = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    password = secrets.token_hex(16)
    options = ("--requirepass", password, "--appendonly", "yes", "--dir", str(tmp_path))
    with RedisServer(tmp_path, *options, password=password) as redis:
        (folder / "redis-password").write_text(password)
        made = Cluster(folder, redis, _free_port(HEAD))
        made.spec_file.write_text(yaml.safe_dump(SPEC))
        made.set_desired_pods(prefill=OLD, decode=OLD)
        (folder / "token").write_text(secrets.token_hex(16))
        (folder / "ray-token").write_text(secrets.token_hex(32))
        try:
            yield made
        finally:
            made.close()
            shutil.rmtree(folder, ignore_errors=True)


def test_engines_outlive_the_head_and_its_redis_and_no_stream_fails(cluster: Cluster) -> None:
    url = start(cluster)
    expected = _stream(url)
    engines = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)}
    assert None not in engines.values()
    with _load(url, expected):
        for _ in range(KILLS):
            cluster.kill("head")
            restarted(cluster)
        # Redis restarts with its volume. Ray's head ends with its connection, and KubeRay restarts the pod.
        cluster.redis.kill()
        cluster.redis.start()
        cluster.processes["head"].wait(60)
        restarted(cluster)
    assert {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)} == engines


def start(cluster: Cluster) -> str:
    """Start the pods; return the router's address once it is ready."""
    cluster.head()
    cluster.until(lambda: bool(cluster.events("head", "ray")), "Ray's head accepts drivers")
    for pool, ip in (("prefill", PREFILL), ("decode", DECODE)):
        # One after another: nodes on one machine compete for its files while they start.
        cluster.worker(pool, ip)
        cluster.until(partial(_serves, ip), f"the pod of {pool} is ready")
    url = cluster.router()
    cluster.until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, "the router is ready")
    return url


def restarted(cluster: Cluster) -> None:
    """Restart the head as KubeRay does, also when it ends again, until the pools are taken over."""
    cluster.head()

    def taken_over() -> bool:
        if cluster.processes["head"].poll() is not None:
            # Ray may not have been up.
            cluster.heads = len(cluster.events("head", "ray"))
            cluster.head()
        return cluster.running() == BOTH

    # Beside two engines that serve, Ray's head may need several attempts on a small machine.
    cluster.until(taken_over, "the pools are taken over", 3 * PATIENCE_S)
