"""Pools on real Ray, under load: restarts, scaling, signals and the loss of Ray's head end no stream.
`test_up_over_https.py` has a head whose state is in Redis.

The engines are simulated and deterministic: every stream of one prompt must have the same text, whichever
workers it ran on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.kit.cluster.pods import steady_load, stream_text
from tests.kit.footprint import Footprint
from tests.kit.processes import command_line, lives
from tests.kit.stack import Stack, runs_anew

from kvasir_platform.cluster.local.commands import ControlCommand, ask, socket_path

pytestmark = pytest.mark.slow

DRAIN_S = 3.0
SHORT, LONG = 40, 240  # tokens: 0.8 s, and longer than a drain
PATIENCE_S = 60.0


@dataclass(slots=True)
class Cluster:
    """The deployment that the tests of this file share."""

    stack: Stack
    texts: dict[int, str]

    def load(self, tokens: int) -> AbstractContextManager[None]:
        return steady_load(self.stack.url, self.texts[tokens], tokens, clients=4)

    def replicas(self, pool: str) -> set[int]:
        """Processes of a pool's replicas."""
        title = f"ServeReplica:kvasir-{pool}:"
        return {process.pid for process in self.stack.processes() if title in command_line(process)}

    def ready(self, pool: str) -> set[str]:
        """Workers that the router uses."""
        return {w["worker_id"] for w in self.stack.workers() if w["pool"] == pool and w["state"] == "ready"}

    def until(self, condition: Callable[[], bool], what: str) -> float:
        return self.stack.wait_until(condition, PATIENCE_S, what)

    def busy_replica(self) -> int:
        """A decode replica in the midst of streams. The router decides which has any: on a loaded machine,
        one that answers late gets none for as long as a minute."""
        busy: list[int] = []

        def streams() -> bool:
            ports = {
                int(each["address"].rpartition(":")[2]) for each in self._decoding() if each["in_flight"]
            }
            busy[:] = [pid for pid in self.replicas("decode") if ports & _ports_of(pid)]
            return bool(busy)

        self.until(streams, "streams on a decode worker")
        return busy[0]

    def wait_until_both_stream(self) -> None:
        """Wait for streams on both decode workers."""
        self.until(
            lambda: all(worker["in_flight"] for worker in self._decoding()), "streams on both decode workers"
        )

    def _decoding(self) -> list[dict[str, Any]]:
        return [worker for worker in self.stack.workers() if worker["pool"] == "decode"]

    def command(self, what: ControlCommand) -> list[dict[str, Any]]:
        state = json.loads((self.stack.home / "kvasir" / "state.json").read_text())
        return list(ask(socket_path(Path(state["temp_dir"])), what, PATIENCE_S))

    def scale(self, replicas: int) -> None:
        assert self.command(ControlCommand("scale", "decode", replicas))[-1]["event"] == "done"
        self.until(lambda: len(self.replicas("decode")) == replicas, f"{replicas} decode replicas")
        self.until(lambda: len(self.ready("decode")) == replicas, f"{replicas} decode workers in use")


def _ports_of(pid: int) -> set[int]:
    """Ports on which a process listens."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {
            each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"
        }
    return set()


@pytest.fixture(scope="module")
def cluster(models: Stack) -> Cluster:
    return Cluster(models, {tokens: stream_text(models.url, tokens) for tokens in (SHORT, LONG)})


@pytest.mark.parametrize("pool", [pytest.param("decode", marks=pytest.mark.soak), "prefill"])
def test_a_rolling_restart_replaces_every_replica_and_fails_no_request(cluster: Cluster, pool: str) -> None:
    before = cluster.replicas(pool)
    with cluster.load(SHORT):
        done = cluster.stack.kvasir("restart", pool)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"restarting {pool}: {len(before)} replicas, one at a time, each new one beside" in done.stdout
    assert not cluster.replicas(pool) & before
    assert len(cluster.replicas(pool)) == len(before)


def test_a_replica_that_is_scaled_away_drains_and_what_is_left_goes_on_elsewhere(cluster: Cluster) -> None:
    with cluster.load(SHORT), cluster.load(LONG):
        cluster.wait_until_both_stream()
        cluster.scale(1)
    cluster.scale(2)


def test_sigterm_to_a_replica_drains_it_and_ray_replaces_it(cluster: Cluster) -> None:
    with cluster.load(SHORT):
        victim = cluster.busy_replica()
        os.kill(victim, signal.SIGTERM)
        took = cluster.until(lambda: victim not in cluster.replicas("decode"), "the drained replica to leave")
        assert took < DRAIN_S + 2
        cluster.until(lambda: len(cluster.ready("decode")) == 2, "another replica")


def test_sigkill_of_a_replica_is_a_matter_of_rays_and_no_client_sees_it(cluster: Cluster) -> None:
    with cluster.load(SHORT):
        victim = cluster.busy_replica()
        os.kill(victim, signal.SIGKILL)
        cluster.until(lambda: len(cluster.replicas("decode") - {victim}) == 2, "another replica")
        cluster.until(lambda: len(cluster.ready("decode")) == 2, "another worker in use")


def test_the_loss_of_rays_head_does_not_stop_serving_and_it_comes_back(cluster: Cluster) -> None:
    replicas = cluster.replicas("decode") | cluster.replicas("prefill")
    head = cluster.stack.named("gcs_server")
    with cluster.load(SHORT), cluster.load(LONG):
        cluster.busy_replica()
        head.kill()
        cluster.until(lambda: not lives(head), "its death")
        cluster.until(lambda: runs_anew(cluster.stack, head), "another head")
        cluster.until(lambda: _takes_commands(cluster), "commands to be taken again")
        # Ray replaces and drains through the head that came back, and the router hears of it.
        cluster.scale(1)
    cluster.scale(2)
    assert len(replicas & (cluster.replicas("decode") | cluster.replicas("prefill"))) == len(replicas) - 1


def _takes_commands(cluster: Cluster) -> bool:
    return bool(cluster.command(ControlCommand("explain", "decode"))[-1]["event"] == "done")


@pytest.mark.soak
def test_replicas_of_another_version_do_not_come_up_and_the_old_ones_serve_on(cluster: Cluster) -> None:
    old = cluster.replicas("decode")
    others = {"protocol_version": 1, "hash_version": 1, "tokenizer_digest": "another"}
    with cluster.load(SHORT), _fence_of(cluster, others):
        done = cluster.stack.kvasir("restart", "decode")
    assert done.returncode == 1
    assert all(f"{name}: " in done.stdout for name in others), done.stdout
    assert "which go on serving" in done.stdout
    assert cluster.replicas("decode") == old
    assert len(cluster.ready("decode")) == 2


@contextlib.contextmanager
def _fence_of(cluster: Cluster, others: dict[str, object]) -> Iterator[None]:
    """The replicas that run are of another version, as far as a new one can tell."""
    kept = _keep(cluster, "get")
    _keep(cluster, "put", json.dumps(json.loads(kept) | others))
    try:
        yield
    finally:
        _keep(cluster, "put", kept)


_KEEP = """
import sys
from ray._raylet import GcsClient
address, what, *value = sys.argv[1:]
gcs, key, space = GcsClient(address=address), b"kvasir/kvasir/fence", b"kvasir"
if what == "get":
    print(gcs.internal_kv_get(key, space, 5.0).decode())
else:
    gcs.internal_kv_put(key, value[0].encode(), True, space, 5.0)
"""


def _keep(cluster: Cluster, *arguments: str) -> str:
    """Read or write the record that fences versions, in a process that may talk to this Ray."""
    gcs = cluster.stack.named("gcs_server")
    port = next(each.partition("=")[2] for each in gcs.cmdline() if each.startswith("--gcs_server_port="))
    command = [sys.executable, "-c", _KEEP, f"127.0.0.1:{port}", *arguments]
    return subprocess.run(command, env=gcs.environ(), capture_output=True, text=True, check=True).stdout


@pytest.mark.soak
def test_a_frozen_replica_is_left_alone_by_the_router_and_replaced_by_ray(cluster: Cluster) -> None:
    with cluster.load(SHORT):
        victim = cluster.busy_replica()
        process = psutil.Process(victim)
        process.suspend()
        try:
            cluster.until(lambda: len(cluster.ready("decode")) == 1, "the router to leave it alone")
            cluster.until(lambda: len(cluster.ready("decode")) == 2, "Ray to replace it")
            cluster.until(lambda: victim not in cluster.replicas("decode"), "Ray to end it")
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.stops_stack
def test_a_supervisor_that_is_killed_takes_everything_along_and_down_cleans_up(cluster: Cluster) -> None:
    footprint = Footprint.of(cluster.stack)
    cluster.stack.process.kill()
    psutil.wait_procs(footprint.processes, timeout=PATIENCE_S)
    assert footprint.alive() == []
    down = cluster.stack.kvasir("down")
    assert down.returncode == 0, down.stderr
    assert not footprint.temp_dir.exists()
