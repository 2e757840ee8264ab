"""A release in a cluster, with the test in place of KubeRay: pods are processes with their own addresses,
started with the variables that KubeRay sets and the `ray start` commands that it generates."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
from tests.kit.processes import command_line, free_port

HEAD, PREFILL, DECODE = "127.0.0.41", "127.0.0.42", "127.0.0.43"
SESSION, HEALTH = 7841, 7842
PATIENCE_S = 90.0
HEAD_ENDS_S = 60.0
TOKENS = 40
# Hashes of the pods' template: the initial one, and the changed one.
OLD, NEW = "0123456789ab", "ba9876543210"
SERVING = int(health_pb2.HealthCheckResponse.SERVING)


@dataclass(slots=True)
class PodCluster:
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
        variables = {
            "KUBERAY_GEN_RAY_START_CMD": command,
            "KVASIR_POD_IP": ip,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray-token"),
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**os.environ, **variables, **environ},
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

    def first_workers(self, pools: Mapping[str, str]) -> None:
        """Start a pod of each pool at its address, and wait until they serve."""
        for pool, ip in pools.items():
            # One after another: nodes on one machine compete for its files while they start.
            self.worker(pool, ip)
            self.until(partial(serves, ip), f"the pod of {pool} is ready")

    def first_head(self) -> None:
        """Start the head, and wait until Ray runs there."""
        self.head()
        self.until(lambda: bool(self.events("head", "ray")), "Ray's head accepts drivers")

    def head(self) -> None:
        self.heads += 1
        command = (
            f"ray start --head  --block  --port={self.port}  --node-ip-address=$KVASIR_POD_IP  --num-cpus=0 "
            "--include-dashboard=false  --no-monitor  --object-store-memory=83886080  --min-worker-port=0 "
            f"--max-worker-port=0  --ray-client-server-port={free_port(HEAD)} "
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
        """Start a router; return its address once it is ready."""
        self.pod(
            "router",
            "127.0.0.1",
            "",
            "kvasir_platform.apps.router_app",
            f"--deployment={self.spec_file}",
            f"--token-file={self.folder / 'token'}",
        )
        self.until(lambda: bool(self.events("router", "listening")), "the router listens")
        url = f"http://{self.events('router', 'listening')[-1]['address']}"
        self.until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, "the router is ready")
        return url

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return events_of((self.folder / f"{name}.log").read_text(errors="replace"), event)

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
        reported = events_of(log.rpartition('{"event": "ray"')[2], "pools")
        if not reported or any(p["state"] != "RUNNING" for p in reported[-1]["pools"]):
            return {}
        return {p["pool"]: p["running"] for p in reported[-1]["pools"]}

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

    def take_over(self, pools: Mapping[str, int]) -> None:
        """Restart the head as KubeRay does, also when it ends again, until it has taken over these pools."""
        self.head()

        def taken_over() -> bool:
            if self.processes["head"].poll() is not None:
                # Ray may not have been up.
                self.heads = len(self.events("head", "ray"))
                self.head()
            return self.running() == pools

        # Beside engines that serve, Ray's head may need several attempts on a small machine.
        self.until(taken_over, "the pools are taken over", 3 * PATIENCE_S)

    def restart_redis(self, pools: Mapping[str, int]) -> None:
        """Restart Redis with its volume. Ray's head ends with its connection; KubeRay restarts its pod."""
        self.redis.kill()
        self.redis.start()
        self.processes["head"].wait(HEAD_ENDS_S)
        self.take_over(pools)

    def lose_gcs(self) -> int:
        """Kill Ray's GCS; return the exit status of the control process."""
        for process in psutil.Process(self.processes["head"].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "gcs_server":
                    process.kill()
        return self.processes["head"].wait(PATIENCE_S)

    def end(self, name: str, within_s: float = PATIENCE_S) -> int:
        """Stop a pod as Kubernetes does; return the exit status. Raises TimeoutExpired."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes[name].wait(within_s)

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


def events_of(log: str, event: str) -> list[dict[str, Any]]:
    reported = [json.loads(line) for line in log.splitlines() if line.startswith('{"event"')]
    return [each for each in reported if each["event"] == event]


def health(ip: str) -> int | None:
    """The response to Kubernetes' gRPC probe of a pod; None if nothing answers."""
    with grpc.insecure_channel(f"{ip}:{HEALTH}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return None
        return int(answer.status)


def serves(ip: str) -> bool:
    return health(ip) == SERVING


def ready_workers(url: str) -> int:
    answer = httpx.get(f"{url}/status", timeout=10)
    return sum(worker["state"] == "ready" for worker in answer.json()["workers"])


def stream_text(url: str, tokens: int = TOKENS, connect: Callable[[], httpx.Client] = httpx.Client) -> str:
    """The text of one greedy stream. Raise AssertionError if it does not end successfully."""
    body = {"model": "kvasir-tiny", "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0}
    text, finish = "", None
    asked = body | {"stream": True, "ignore_eos": True}
    with (
        connect() as client,
        client.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as answer,
    ):
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


def vllm_release(*decoders: str) -> dict[str, Any]:
    """The spec of a prefill and a decode pool of vLLM, the latter at these addresses. Float32 and one thread
    for each engine, so that a greedy stream has the same text wherever it goes on."""
    pools = (("prefill", PREFILL), *(("decode", ip) for ip in decoders))
    return {
        "version": "kvasir/v1",
        "name": "kvasir",
        "disaggregation": "always",
        "model": {"dtype": "float32", "max_model_len": 1024},
        "pools": [
            {"name": role, "role": role, "engine": {"threads": 1, "kv_cache_bytes": 1 << 24}}
            for role in ("prefill", "decode")
        ],
        "transfer": {"host": "pod"},
        "worker": {"host": "pod", "port": SESSION, "health_port": HEALTH, "drain_s": 3},
        "gateway": {"host": "127.0.0.1", "port": 0},
        "discovery": {"kind": "static", "endpoints": [f"{pool}={ip}:{SESSION}" for pool, ip in pools]},
    }


@contextlib.contextmanager
def steady_load(
    url: str,
    expected: str,
    tokens: int = TOKENS,
    clients: int = 1,
    connect: Callable[[], httpx.Client] = httpx.Client,
) -> Iterator[None]:
    """Run streams one after another in `clients` threads until the context ends; every one must be right."""
    stop, wrong, ended = threading.Event(), list[str](), list[int]()

    def run() -> None:
        while not stop.is_set():
            try:
                assert stream_text(url, tokens, connect) == expected, "another text"
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(repr(error))
            ended.append(1)

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(ended) >= clients


@contextlib.contextmanager
def pod_cluster(redis_folder: Path, spec: Mapping[str, Any], *redis_options: str) -> Iterator[PodCluster]:
    """A release of `spec` without pods, with a Redis server of its own; `redis_options` are further arguments
    of that."""
    folder = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    password = secrets.token_hex(16)
    options = ("--requirepass", password, *redis_options)
    with RedisServer(redis_folder, *options, password=password) as redis:
        (folder / "redis-password").write_text(password)
        made = PodCluster(folder, redis, free_port(HEAD))
        made.spec_file.write_text(yaml.safe_dump(spec))
        made.set_desired_pods(**{pool["name"]: OLD for pool in spec["pools"]})
        (folder / "token").write_text(secrets.token_hex(16))
        (folder / "ray-token").write_text(secrets.token_hex(32))
        try:
            yield made
        finally:
            made.close()
            shutil.rmtree(folder, ignore_errors=True)
