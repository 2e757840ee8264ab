"""A release in a cluster, with this test in place of KubeRay: pods are processes with their own addresses,
started with the variables that KubeRay sets and the `ray start` commands that it generates.

The engines are simulated and deterministic: every stream of one prompt must have the same text.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.kit.lab.redis_server import RedisServer
from tests.kit.processes import command_line

from kvasir_platform.cluster.local.commands import ControlCommand, ask, socket_path

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

HEAD, PREFILL, DECODE, SPARE = "127.0.0.41", "127.0.0.42", "127.0.0.43", "127.0.0.44"
SESSION, HEALTH = 7841, 7842
PATIENCE_S = 90.0
TOKENS = 40
# Hashes of the pods' template: the initial one, and the changed one.
OLD, NEW = "0123456789ab", "ba9876543210"
SERVING = int(health_pb2.HealthCheckResponse.SERVING)


def _spec(redis: RedisServer) -> dict[str, Any]:
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


@dataclass(slots=True)
class Cluster:
    """`folder` is short, because Ray puts Unix sockets in it."""

    folder: Path
    redis: RedisServer
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    heads: int = 0

    @property
    def spec_file(self) -> Path:
        return self.folder / "kvasir.yaml"

    def pod(self, name: str, ip: str, command: str, *arguments: str, **environ: str) -> None:
        """Start a pod's process as the chart does."""
        told = {
            "KUBERAY_GEN_RAY_START_CMD": command,
            "KVASIR_POD_IP": ip,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray-token"),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**os.environ, **told, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pods_file(self) -> Path:
        return self.folder / "pods.json"

    @property
    def head_dir(self) -> Path:
        """The disk of the head's pod, which is deleted with it."""
        return self.folder / f"h{self.heads}"

    def head(self) -> None:
        self.heads += 1
        command = (
            f"ray start --head  --block  --port={self.port}  --node-ip-address=$KVASIR_POD_IP  --num-cpus=0 "
            "--include-dashboard=false  --no-monitor  --object-store-memory=83886080  --min-worker-port=0 "
            f"--max-worker-port=0  --ray-client-server-port={_free_port(HEAD)} "
        )
        self.pod(
            "head",
            HEAD,
            command,
            "kvasir_platform.apps.control_app",
            "--cluster",
            f"--deployment={self.spec_file}",
            f"--pods-file={self.pods_file}",
            f"--token-file={self.folder / 'token'}",
            f"--temp-dir={self.head_dir}",
            f"--redis-password-file={self.folder / 'redis-password'}",
            RAY_REDIS_ADDRESS=f"redis://{self.redis.address}",
            RAY_external_storage_namespace="release-uid",
        )

    def worker(self, pool: str, ip: str, template: str = OLD) -> None:
        command = (
            f"ray start  --address={HEAD}:{self.port}  --block  --node-ip-address={ip}  --num-cpus=1 "
            "--object-store-memory=83886080  --min-worker-port=0  --max-worker-port=0 "
            f'--resources="{{\\"kvasir-pool-{pool}\\": 1, \\"kvasir-template-{template}\\": 1}}"'
        )
        self.pod(ip, ip, command, "kvasir_platform.apps.worker_pod", "--grace-s=20")

    def router(self) -> str:
        self.pod(
            "router",
            "127.0.0.1",
            "",
            "kvasir_platform.apps.router_app",
            f"--deployment={self.spec_file}",
            f"--token-file={self.folder / 'token'}",
        )
        self.until(lambda: bool(self.events("router", "listening")), "the router listens")
        return f"http://{self.events('router', 'listening')[-1]['address']}"

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return _events((self.folder / f"{name}.log").read_text(errors="replace"), event)

    def until(self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> float:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > patience_s:
                ends = {
                    name: (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]
                    for name in self.processes
                }
                pytest.fail(f"not within {patience_s:.0f} s: {what}\n" + "\n".join(map(str, ends.items())))
            time.sleep(0.1)
        return time.monotonic() - began

    def replica(self, ip: str) -> int | None:
        """The process that serves in a pod, None if there is none."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.processes[ip].pid).children(recursive=True):
                if command_line(process).startswith("ray::ServeReplica:"):
                    return process.pid
        return None

    def running(self) -> dict[str, int]:
        """Return the control process's status of its pools, once all are in the desired state."""
        if len(self.events("head", "ray")) != self.heads:
            return {}
        log = (self.folder / "head.log").read_text(errors="replace")
        told = _events(log.rpartition('{"event": "ray"')[2], "pools")
        if not told or any(p["state"] != "RUNNING" for p in told[-1]["pools"]):
            return {}
        return {p["pool"]: p["running"] for p in told[-1]["pools"]}

    def replace_spec(self, spec: dict[str, Any]) -> None:
        """Replace the file atomically, as a ConfigMap is replaced."""
        beside = self.spec_file.with_suffix(".new")
        beside.write_text(yaml.safe_dump(spec))
        beside.rename(self.spec_file)

    def set_desired_pods(self, **templates: str) -> None:
        """Set the desired template of each pool's pods."""
        desired = {pool: {"template": template, "pods": 2} for pool, template in templates.items()}
        beside = self.pods_file.with_suffix(".new")
        beside.write_text(json.dumps(desired))
        beside.rename(self.pods_file)

    def make_anew(self, pool: str, template: str, *ips: str) -> None:
        """Act as KubeRay: delete a pod that has ended, and create another."""
        for ip in ips:
            if (status := self.processes[ip].poll()) is not None:
                assert status == 0, (self.folder / f"{ip}.log").read_text(errors="replace")[-4000:]
                self.worker(pool, ip, template)

    def lose_gcs(self) -> int:
        """Kill Ray's GCS; return the exit status of the control process."""
        for process in psutil.Process(self.processes["head"].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "gcs_server":
                    process.kill()
        return self.processes["head"].wait(PATIENCE_S)

    def end(self, name: str) -> int:
        """Stop a pod as Kubernetes does; return the exit status."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes[name].wait(PATIENCE_S)

    def kill(self, name: str) -> None:
        """Kill a pod's process and all its descendants at once, as if its node lost power."""
        root = psutil.Process(self.processes[name].pid)
        tree = [root, *root.children(recursive=True)]
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(tree, 10)
        self.processes[name].wait(10)

    def close(self) -> None:
        for name, process in reversed(self.processes.items()):
            if process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    self.kill(name)


def _events(log: str, event: str) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in log.splitlines() if line.startswith('{"event"')]
    return [each for each in told if each["event"] == event]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _health(ip: str) -> int | None:
    """The response to Kubernetes' gRPC probe of a pod; None if nothing answers."""
    with grpc.insecure_channel(f"{ip}:{HEALTH}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return None
        return int(answer.status)


def _serves(ip: str) -> bool:
    return _health(ip) == SERVING


def _ready_workers(url: str) -> int:
    answer = httpx.get(f"{url}/status", timeout=10)
    return sum(worker["state"] == "ready" for worker in answer.json()["workers"])


def _stream(url: str, tokens: int = TOKENS) -> str:
    """The text of one greedy stream. Raise AssertionError if it does not end successfully."""
    body = {"model": "kvasir-tiny", "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0}
    text, finish = "", None
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True, "ignore_eos": True}, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()[:500]
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                assert finish == "length", f"finish_reason {finish!r}"
                return text
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
    raise AssertionError(f"cut after {len(text)} characters")


@contextlib.contextmanager
def _load(url: str, expected: str) -> Iterator[list[str]]:
    """Run streams one after another until the context ends; yield the list of errors."""
    stop, wrong, ended = threading.Event(), list[str](), list[int]()

    def run() -> None:
        while not stop.is_set():
            try:
                assert _stream(url) == expected, "another text"
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(repr(error))
            ended.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    assert ended


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A release of two pools, one pod each."""
    folder = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    password = secrets.token_hex(16)
    with RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", password, password=password) as redis:
        (folder / "redis-password").write_text(password)
        made = Cluster(folder, redis, _free_port(HEAD))
        made.spec_file.write_text(yaml.safe_dump(_spec(redis)))
        made.set_desired_pods(prefill=OLD, decode=OLD)
        (folder / "token").write_text(secrets.token_hex(16))
        (folder / "ray-token").write_text(secrets.token_hex(32))
        try:
            yield made
        finally:
            made.close()
            shutil.rmtree(folder, ignore_errors=True)


def test_a_release_serves_outlives_its_head_and_loses_pods_without_a_stream(cluster: Cluster) -> None:
    cluster.head()
    cluster.until(lambda: bool(cluster.events("head", "ray")), "Ray's head accepts drivers")
    assert _health(DECODE) is None, "a pod without its replica must not be ready"
    for pool, ip in (("prefill", PREFILL), ("decode", DECODE)):
        # One after another: nodes on one machine compete for its files while they start.
        cluster.worker(pool, ip)
        cluster.until(partial(_serves, ip), f"the pod of {pool} is ready")
    url = cluster.router()
    cluster.until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, "the router is ready")
    expected = _stream(url)
    serving = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)}
    assert None not in serving.values()

    # The head's node loses power, and its pod restarts with an empty disk.
    with _load(url, expected):
        cluster.kill("head")
        cluster.head()
        cluster.until(lambda: cluster.running() == {"prefill": 1, "decode": 1}, "the pools are taken over")
    assert {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)} == serving

    # It accepts commands again, as `kubectl exec` sends them: a second decode worker gets the second pod.
    cluster.worker("decode", SPARE)
    told = list(ask(socket_path(cluster.head_dir), ControlCommand("scale", "decode", 2), PATIENCE_S))
    assert told[-1]["event"] == "done", told
    cluster.until(lambda: _health(SPARE) == SERVING, "the second decode pod is ready")
    cluster.until(lambda: _ready_workers(url) == 3, "the router has three workers")

    # A graceful end of the head's pod does not affect the workers, and requested sizes are kept.
    with _load(url, expected):
        assert cluster.end("head") == 0
        cluster.head()
        cluster.until(lambda: cluster.running() == {"prefill": 1, "decode": 2}, "the pools are taken over")
    assert {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)} == serving

    # Kubernetes stops a worker's pod while streams run.
    with _load(url, expected):
        assert cluster.end(DECODE) == 0
        assert cluster.events(DECODE, "draining")
    assert _health(DECODE) is None

    # KubeRay creates another pod, and the missing worker starts in it.
    cluster.worker("decode", DECODE)
    cluster.until(lambda: _ready_workers(url) == 3, "the router has three workers again")

    # A change of the spec replaces the affected workers one by one, and no others.
    spec = yaml.safe_load(cluster.spec_file.read_text())
    spec["pools"][1]["engine"] |= {"max_num_seqs": 32}
    before = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE, SPARE)}
    with _load(url, expected):
        cluster.replace_spec(spec)
        cluster.until(
            lambda: all(cluster.replica(ip) not in (None, before[ip]) for ip in (DECODE, SPARE)),
            "both decode workers are replaced",
        )
        cluster.until(lambda: _ready_workers(url) == 3, "the router has the changed ones")
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

    with _load(url, expected):
        cluster.set_desired_pods(prefill=OLD, decode=NEW)
        cluster.replace_spec(spec)
        cluster.until(moved, "decode's workers are in pods of the changed template")
        cluster.until(lambda: _ready_workers(url) == 3, "the router has those in the pods made anew")
    assert [told["template"] for told in cluster.events("head", "let_go")] == [OLD, OLD]
    assert all(len(pids - {before[ip]}) == 1 for ip, pids in seen.items()), "replaced once each"
    assert all(cluster.events(ip, "left") for ip in seen)
    assert cluster.replica(PREFILL) == before[PREFILL]
    assert not cluster.events("head", "settled")

    # Ray's head loses its GCS: the process exits, so that KubeRay restarts the pod.
    assert cluster.lose_gcs() == 1
    assert cluster.events("head", "failed")[-1]["code"] == "ray_head_lost"
    assert _stream(url) == expected
